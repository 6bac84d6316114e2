//! What the WebGPU backend promises beyond the numbers: default limits, WebGPU's rules on bindings by name,
//! bounded staging memory, and work on a host's device.
#![cfg(feature = "webgpu")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lorapool::backend::webgpu::{Options, WebGpuBackend, wgpu};
use lorapool::backend::{Encoder, GpuBackend, Launch, Pipeline};
use lorapool::conformance;
use lorapool::contract::{Kernel, Params, RowRef, SiteParams, Spec};
use lorapool::{DType, Error, Region, Result};

/// One device at a time: a software driver has few threads, and some tests measure memory.
static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first device with `options`; `None` (and a line saying so) where there is none and `REQUIRE_BACKENDS`
/// doesn't ask.
fn open(options: &Options) -> Option<WebGpuBackend> {
    match WebGpuBackend::open(0, options) {
        Ok(backend) => Some(backend),
        Err(error) => {
            let required = std::env::var("REQUIRE_BACKENDS").unwrap_or_default();
            assert!(!required.split(',').any(|name| name.trim() == "webgpu"), "required, but {error}");
            println!("skipped: {error}");
            None
        }
    }
}

fn limited() -> Option<WebGpuBackend> {
    open(&Options { limits: Some(wgpu::Limits::defaults()), ..Options::default() })
}

fn upload(backend: &dyn GpuBackend, bytes: &[u8]) -> Region {
    let region = backend.alloc(bytes.len() as u64, "test").unwrap();
    backend.submit(&mut |encoder| encoder.write(&region, bytes)).unwrap();
    region
}

/// An adapter of rank 1 in slot 0 with one input and `b.len()` outputs, scale 1: `y += B * (A * x)`.
struct Toy {
    spec: Spec,
    shrink: Pipeline,
    expand: Pipeline,
    /// Batch of one row, tables, weights.
    fixed: [Region; 3],
    outputs: u32,
    rows: u32,
}

/// Elements between rows of A and B.
const STRIDE: u32 = 8;

impl Toy {
    fn new(backend: &dyn GpuBackend, spec: Spec, a: f32, b: &[f32], rows: u32) -> Self {
        let mut values = vec![0.0; (1 + b.len()) * STRIDE as usize];
        values[0] = a;
        b.iter().zip(values.chunks_mut(STRIDE as usize).skip(1)).for_each(|(b, row)| row[0] = *b);
        let mut bytes = Vec::new();
        spec.weight.encode(&values, &mut bytes);
        Self::with_weights(backend, spec, &bytes, b.len() as u32, rows)
    }

    fn with_weights(backend: &dyn GpuBackend, spec: Spec, bytes: &[u8], outputs: u32, rows: u32) -> Self {
        let weights = upload(backend, bytes);
        let cells = [weights.ptr().0, weights.ptr().0 + u64::from(STRIDE) * spec.weight.size()];
        let mut tables: Vec<u32> = cells.iter().flat_map(|c| [*c as u32, (*c >> 32) as u32]).collect();
        tables.extend([1, 1f32.to_bits()]);
        let batch = vec![RowRef { slot: 0, scale: 1.0 }; rows as usize];
        Self {
            spec,
            shrink: backend.load(Kernel::BgmvShrink, spec).unwrap(),
            expand: backend.load(Kernel::BgmvExpand, spec).unwrap(),
            fixed: [
                upload(backend, bytemuck::cast_slice(&batch)),
                upload(backend, bytemuck::cast_slice(&tables)),
                weights,
            ],
            outputs,
            rows,
        }
    }

    fn params(&self, cells: u32, rows_of_matrix: u32) -> Params {
        let site = SiteParams {
            cells,
            ranks: 4,
            scales: 5,
            span: (u64::from(rows_of_matrix * STRIDE) * self.spec.weight.size() / 4) as u32,
            out_features: self.outputs,
            y_stride: self.outputs,
            ..SiteParams::default()
        };
        let mut params = Params {
            rows: self.rows,
            slots: 1,
            slot_count: 1,
            sites: 1,
            in_features: 1,
            x_stride: 1,
            a_stride: STRIDE,
            b_stride: STRIDE,
            z_stride: 1,
            max_rank: 1,
            max_out: self.outputs,
            ..Params::default()
        };
        params.site[0] = site;
        params
    }

    fn shrink(&self, encoder: &mut dyn Encoder, x: &Region, z: &Region) -> Result<()> {
        let operands = [&self.fixed[0], &self.fixed[1], &self.fixed[2], x, z].map(Region::clone);
        encoder.launch(&[Launch::new(&self.shrink, &operands, self.params(0, 1))?])
    }

    fn expand(&self, encoder: &mut dyn Encoder, z: &Region, y: &Region) -> Result<()> {
        let operands = [&self.fixed[0], &self.fixed[1], &self.fixed[2], z, y].map(Region::clone);
        encoder.launch(&[Launch::new(&self.expand, &operands, self.params(2, self.outputs))?])
    }
}

const F32: Spec = Spec { act: DType::F32, weight: DType::F32 };

fn floats(backend: &dyn GpuBackend, region: &Region) -> Vec<f32> {
    DType::F32.decode(&backend.read(region).unwrap())
}

#[test]
fn everything_works_with_webgpus_default_limits_and_no_feature() {
    let _turn = turn();
    let Some(backend) = limited() else { return };
    assert!(backend.device().features().is_empty());
    assert_eq!(backend.caps().binding_align, 256);
    assert_eq!(backend.caps().max_binding, 128 << 20);
    let report = conformance::smoke(&backend);
    assert!(report.failures.is_empty(), "{:?}", report.failures);
    assert!(report.ignored.is_empty(), "{:?}", report.ignored);
}

#[test]
fn limits_too_low_for_the_kernels_are_refused_by_name() {
    let _turn = turn();
    if open(&Options::default()).is_none() {
        return;
    }
    let options = Options { limits: Some(wgpu::Limits::downlevel_defaults()), ..Options::default() };
    let error = WebGpuBackend::open(0, &options).unwrap_err();
    assert_eq!(error.code(), "E_UNAVAILABLE");
    assert!(error.to_string().contains("max_storage_buffers_per_shader_stage is 4, 8 are needed"), "{error}");
    let error = WebGpuBackend::open(1000, &Options::default()).unwrap_err();
    assert_eq!(error.code(), "E_UNAVAILABLE");
}

#[test]
fn an_operand_past_the_binding_limit_is_named_and_one_that_needs_less_is_not() {
    let _turn = turn();
    let Some(backend) = limited() else { return };
    let toy = Toy::new(&backend, F32, 1.0, &[1.0], 1);
    let large = backend.alloc((128 << 20) + 16, "large").unwrap();
    let small = backend.alloc(4, "small").unwrap();
    // x is one element: the launch needs the beginning alone.
    backend.submit(&mut |encoder| toy.shrink(encoder, &large, &small)).unwrap();
    let mut weights = toy.fixed.clone();
    weights[2] = large;
    let toy = Toy { fixed: weights, ..toy };
    match backend.submit(&mut |encoder| toy.shrink(encoder, &small, &backend.alloc(4, "z")?)).unwrap_err() {
        Error::Limit { what, found, limit, .. } => {
            assert_eq!((what, found, limit), ("size of operand weights", (128 << 20) + 16, 128 << 20));
        }
        other => panic!("{other}"),
    }
    match backend.alloc((256 << 20) + 1, "too large").unwrap_err() {
        Error::Limit { limit, .. } => assert_eq!(limit, 256 << 20),
        other => panic!("{other}"),
    }
}

#[test]
fn reading_and_writing_one_allocation_in_a_dispatch_is_refused_with_the_reason() {
    let _turn = turn();
    let Some(backend) = open(&Options::default()) else { return };
    let toy = Toy::new(&backend, F32, 1.0, &[1.0], 1);
    let all = backend.alloc(8192, "x and z").unwrap();
    let (x, z) = (all.slice(0, 4).unwrap(), all.slice(4096, 4).unwrap());
    let error = backend.submit(&mut |encoder| toy.shrink(encoder, &x, &z)).unwrap_err();
    assert_eq!(error.code(), "E_SHAPE");
    let message = error.to_string();
    assert!(message.contains("operands z and x of bgmv_shrink") && message.contains("WebGPU"), "{message}");
}

#[test]
fn two_outputs_may_share_an_allocation_where_their_bindings_are_apart() {
    let _turn = turn();
    let Some(backend) = limited() else { return };
    let toy = Toy::new(&backend, F32, 1.0, &[3.0], 1);
    let z = upload(&backend, bytemuck::cast_slice(&[2.0f32]));
    let all = backend.alloc(1024, "y0 and y1").unwrap();
    let mut params = toy.params(2, 1);
    params.sites = 2;
    params.site[1] = SiteParams { y_operand: 1, ..params.site[0] };
    let launch = |at: [u64; 2]| {
        let y = at.map(|at| all.slice(at, 4).unwrap());
        let operands = [&toy.fixed[0], &toy.fixed[1], &toy.fixed[2], &z, &y[0], &y[1]].map(Region::clone);
        backend.submit(&mut |encoder| encoder.launch(&[Launch::new(&toy.expand, &operands, params)?]))
    };
    launch([252, 512]).unwrap();
    let got = floats(&backend, &all);
    let written: Vec<_> = got.iter().enumerate().filter(|(_, v)| **v != 0.0).map(|(i, v)| (i, *v)).collect();
    assert_eq!(written, [(63, 6.0), (128, 6.0)]);
    // Both begin in the same 256 bytes, so their bindings begin at the same byte.
    let error = launch([256, 300]).unwrap_err();
    assert_eq!(error.code(), "E_SHAPE");
    assert!(error.to_string().contains("operands y0 and y1 of bgmv_expand"), "{error}");
}

#[test]
fn ten_thousand_writes_reuse_their_staging_memory() {
    let _turn = turn();
    let Some(backend) = open(&Options::default()) else { return };
    let region = backend.alloc(1 << 16, "test").unwrap();
    let mut bytes = vec![0u8; 1 << 16];
    for i in 0..10_000u32 {
        bytes[..4].copy_from_slice(&i.to_le_bytes());
        backend.submit(&mut |encoder| encoder.write(&region, &bytes)).unwrap();
    }
    // 625 MiB went through.
    assert!(backend.staging_bytes() <= 256 << 20, "{} bytes of staging memory", backend.staging_bytes());
    assert_eq!(backend.read(&region).unwrap()[..4], 9_999u32.to_le_bytes());
}

#[test]
fn a_large_write_arrives_whole_and_in_order() {
    let _turn = turn();
    let Some(backend) = open(&Options::default()) else { return };
    let region = backend.alloc(40 << 20, "test").unwrap();
    let bytes: Vec<u8> = (0..10u32 << 20).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let ticket = backend
        .submit(&mut |encoder| {
            encoder.write(&region.slice(0, 12)?, &[7; 12])?;
            encoder.write(&region, &bytes)?;
            encoder.write(&region.slice(20, 4)?, &[1, 2, 3, 4])
        })
        .unwrap();
    backend.wait(ticket).unwrap();
    let got = backend.read(&region).unwrap();
    assert_eq!(got[20..24], [1, 2, 3, 4]);
    assert!(got[..20] == bytes[..20] && got[24..] == bytes[24..]);
}

#[test]
fn a_copy_inside_one_allocation_goes_through() {
    let _turn = turn();
    let Some(backend) = open(&Options::default()) else { return };
    // More than one trip of the buffer in between.
    let len = (9 << 20) + 4;
    let bytes: Vec<u8> = (0..len).map(|i| (i / 4 % 251) as u8).collect();
    let all = backend.alloc(2 * len, "test").unwrap();
    let (first, second) = (all.slice(0, len).unwrap(), all.slice(len, len).unwrap());
    backend
        .submit(&mut |encoder| {
            encoder.write(&first, &bytes)?;
            encoder.copy(&second, &first)
        })
        .unwrap();
    assert!(backend.read(&second).unwrap() == bytes);
}

#[test]
fn a_graph_of_many_launches_replays_in_order_with_the_bytes_behind_it() {
    let _turn = turn();
    let Some(backend) = open(&Options::default()) else { return };
    let toy = Toy::new(&backend, F32, 1.0, &[1.0], 1);
    let (x, z) = (upload(&backend, &1f32.to_le_bytes()), backend.alloc(4, "z").unwrap());
    let y = backend.alloc(4, "y").unwrap();
    // Envelopes take more than one page, and launches depend on each other.
    const STEPS: usize = 700;
    let graph = backend
        .capture(&mut |encoder| {
            encoder.write(&y, &100f32.to_le_bytes())?;
            for _ in 0..STEPS {
                toy.shrink(encoder, &x, &z)?;
                toy.expand(encoder, &z, &y)?;
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(floats(&backend, &y), [0.0]);
    for value in [1.0f32, 2.0, 0.5] {
        backend.submit(&mut |encoder| encoder.write(&x, &value.to_le_bytes())).unwrap();
        graph.replay().unwrap();
        assert_eq!(floats(&backend, &y), [100.0 + value * STEPS as f32]);
    }
}

#[test]
fn every_two_byte_number_converts_exactly_and_rounds_to_even() {
    let _turn = turn();
    let Some(backend) = open(&Options::default()) else { return };
    let all: Vec<u8> = (0..=u16::MAX).flat_map(|bits| bits.to_le_bytes()).collect();
    for dtype in [DType::F16, DType::Bf16] {
        let values = dtype.decode(&all);
        // Decoding: x is the number, A is 1, z is an f32.
        let toy = Toy::new(&backend, Spec { act: dtype, weight: DType::F32 }, 1.0, &[1.0], 1 << 16);
        let (x, z) = (upload(&backend, &all), backend.alloc(4 << 16, "z").unwrap());
        backend.submit(&mut |encoder| toy.shrink(encoder, &x, &z)).unwrap();
        for (value, got) in values.iter().zip(floats(&backend, &z)) {
            // A device may flush subnormals of f32 in arithmetic; those of f16 are normal there.
            let flushed = value.abs() < f32::MIN_POSITIVE && got == 0.0;
            assert!(*value == got || (value.is_nan() && got.is_nan()) || flushed, "{dtype}: {value:e} became {got:e}");
        }
        // Decoding as a weight: B is the number and z is 1.
        let mut weights = vec![0u8; (1 + (1 << 16)) * STRIDE as usize * 2];
        all.chunks(2).zip(weights.chunks_mut(STRIDE as usize * 2).skip(1)).for_each(|(b, row)| {
            row[..2].copy_from_slice(b);
        });
        let toy = Toy::with_weights(&backend, Spec { act: DType::F32, weight: dtype }, &weights, 1 << 16, 1);
        let (z, y) = (upload(&backend, &1f32.to_le_bytes()), backend.alloc(4 << 16, "y").unwrap());
        backend.submit(&mut |encoder| toy.expand(encoder, &z, &y)).unwrap();
        for (value, got) in values.iter().zip(floats(&backend, &y)) {
            let flushed = value.abs() < f32::MIN_POSITIVE && got == 0.0;
            assert!(*value == got || (value.is_nan() && got.is_nan()) || flushed, "{dtype}: {value:e} became {got:e}");
        }
        // Encoding: y is 0, B is 1, z is an f32 at, just below, just above and half way between numbers.
        let mut sums = Vec::new();
        for value in &values {
            let bits = value.to_bits();
            let half =
                (bits & 0x8000_0000) | ((f64::from(value.abs()) + dtype.ulp((*value).into()) / 2.0) as f32).to_bits();
            sums.extend(
                [bits, bits.wrapping_add(1), bits.wrapping_sub(1), half, half + 1, half - 1].map(f32::from_bits),
            );
        }
        let rows = sums.len() as u32;
        let toy = Toy::new(&backend, Spec { act: dtype, weight: DType::F32 }, 1.0, &[1.0], rows);
        let z = upload(&backend, bytemuck::cast_slice(&sums));
        let y = backend.alloc(2 * u64::from(rows), "y").unwrap();
        backend.submit(&mut |encoder| toy.expand(encoder, &z, &y)).unwrap();
        let got = dtype.decode(&backend.read(&y).unwrap());
        for (sum, got) in sums.iter().zip(got) {
            let want = dtype.round(*sum);
            let flushed = sum.abs() <= f32::MIN_POSITIVE && got == 0.0;
            assert!(
                want == got || (want.is_nan() && got.is_nan()) || flushed,
                "{dtype}: {sum:e} became {got:e}, not {want:e}"
            );
        }
    }
}

#[test]
fn a_hosts_device_encoder_and_buffers_are_used_in_place() {
    let _turn = turn();
    let Some(ours) = open(&Options::default()) else { return };
    // The host's device: any other one.
    let (device, queue) = (ours.device().clone(), ours.queue().clone());
    let heard = Arc::new(AtomicUsize::new(0));
    let ear = heard.clone();
    device.on_uncaptured_error(Arc::new(move |error| {
        println!("the host heard {error}");
        ear.fetch_add(1, Ordering::Relaxed);
    }));
    let backend = WebGpuBackend::adopt(device.clone(), queue.clone()).unwrap();

    let usage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST;
    let buffer =
        |size| device.create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false });
    let (x, y) = (buffer(16), buffer(16));
    let (x_region, y_region) = (backend.import(&x).unwrap(), backend.import(&y).unwrap());
    let toy = Toy::new(&backend, F32, 5.0, &[1.0, 2.0], 1);
    let z = backend.alloc(4, "z").unwrap();

    // The host writes x, we apply, the host copies y back to x, we apply once more.
    queue.write_buffer(&x, 0, &1f32.to_le_bytes());
    let mut commands = device.create_command_encoder(&Default::default());
    let mut apply = |encoder: &mut dyn Encoder| {
        toy.shrink(encoder, &x_region, &z)?;
        toy.expand(encoder, &z, &y_region)
    };
    backend.encode(&mut commands, &mut apply).unwrap();
    commands.copy_buffer_to_buffer(&y, 4, &x, 0, 4);
    backend.encode(&mut commands, &mut apply).unwrap();
    queue.submit([commands.finish()]);
    // 1 -> (5, 10); x = 10 -> + (50, 100).
    assert_eq!(floats(&backend, &y_region)[..2], [55.0, 110.0]);

    // A record that fails leaves the host's encoder as it was.
    let mut commands = device.create_command_encoder(&Default::default());
    let failed = backend.encode(&mut commands, &mut |encoder| {
        apply(encoder)?;
        encoder.write(&y_region.slice(0, 4)?, &[0; 8])
    });
    assert_eq!(failed.unwrap_err().code(), "E_OUT_OF_BOUNDS");
    queue.submit([commands.finish()]);
    assert_eq!(floats(&backend, &y_region)[..2], [55.0, 110.0]);

    // Memory of the other backend on this device is not taken for our own.
    let foreign = ours.alloc(16, "foreign").unwrap();
    assert_eq!(backend.read(&foreign).unwrap_err().code(), "E_SHAPE");

    // What can't be imported.
    assert_eq!(backend.import(&buffer(20)).unwrap_err().code(), "E_SHAPE");
    let plain = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 16,
        usage: wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    assert_eq!(backend.import(&plain).unwrap_err().code(), "E_SHAPE");

    // An error of wgpu's own is ours to report: this buffer can't be copied from.
    let sink = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 16,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    let error = backend.read(&backend.import(&sink).unwrap()).unwrap_err();
    assert_eq!(error.code(), "E_DRIVER", "{error}");
    assert_eq!(heard.load(Ordering::Relaxed), 0);
    // And the backend goes on.
    assert_eq!(floats(&backend, &y_region)[..2], [55.0, 110.0]);
}

#[test]
fn threads_that_read_and_write_at_once_never_wait_for_each_other_for_good() {
    let _turn = turn();
    let Some(backend) = open(&Options::default()) else { return };
    std::thread::scope(|scope| {
        for thread in 0..8u32 {
            let backend = &backend;
            scope.spawn(move || {
                let region = backend.alloc(64, "test").unwrap();
                for i in 0..200u32 {
                    let bytes = (thread * 1000 + i).to_le_bytes();
                    backend.submit(&mut |encoder| encoder.write(&region.slice(8, 4)?, &bytes)).unwrap();
                    assert_eq!(backend.read(&region.slice(8, 4).unwrap()).unwrap(), bytes);
                    backend.completed().unwrap();
                }
            });
        }
    });
}

/// Set in the process that runs a test again without a driver.
const CHILD: &str = "LORAPOOL_TEST_CHILD";

#[test]
fn without_a_driver_the_backend_is_unavailable_with_the_reason() {
    let name = "without_a_driver_the_backend_is_unavailable_with_the_reason";
    if !cfg!(target_os = "linux") {
        return;
    }
    if std::env::var_os(CHILD).is_some() {
        let error = WebGpuBackend::open(0, &Options::default()).unwrap_err();
        assert_eq!(error.code(), "E_UNAVAILABLE");
        assert!(error.to_string().contains("no driver found"), "{error}");
        assert!(lorapool::backend::webgpu::devices().is_err());
        let listing = lorapool::backend::list();
        let own = listing.iter().find(|l| l.backend == "webgpu").unwrap();
        assert!(own.devices.is_empty() && own.unavailable.is_some());
        return;
    }
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .env("VK_DRIVER_FILES", "/nonexistent.json")
        .env("VK_ICD_FILENAMES", "/nonexistent.json")
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&[run.stdout, run.stderr].concat()).into_owned();
    assert!(run.status.success() && output.contains("1 passed"), "{:?}\n{output}", run.status);
}
