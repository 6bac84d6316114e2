//! What the Vulkan backend promises beyond the numbers: order, lifetimes, limits, and work on a host's device.
#![cfg(feature = "vulkan")]
// A host's device is made of raw handles.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex};

use lorapool::backend::vulkan::ash::{self, vk};
use lorapool::backend::vulkan::{self, HostDevice, VulkanBackend};
use lorapool::backend::{Encoder, GpuBackend, Launch, Pipeline};
use lorapool::contract::{Kernel, Params, SiteParams, Spec};
use lorapool::{DType, Error, Region};

/// The first device; `None` (and a line saying so) where there is none and `REQUIRE_BACKENDS` doesn't ask.
fn backend() -> Option<VulkanBackend> {
    match VulkanBackend::open(0) {
        Ok(backend) => Some(backend),
        Err(error) => {
            let required = std::env::var("REQUIRE_BACKENDS").unwrap_or_default();
            assert!(!required.split(',').any(|name| name.trim() == "vulkan"), "required, but {error}");
            println!("skipped: {error}");
            None
        }
    }
}

fn upload(backend: &dyn GpuBackend, bytes: &[u8]) -> Region {
    let region = backend.alloc(bytes.len() as u64, "test").unwrap();
    backend.submit(&mut |encoder| encoder.write(&region, bytes)).unwrap();
    region
}

/// `y[0] += x[0]`, as an adapter with A = B = [1], rank 1 and scale 1 in slot 0: order shows in y.
struct Adder {
    shrink: Pipeline,
    expand: Pipeline,
    fixed: [Region; 3],
    x: Region,
    z: Region,
    y: Region,
}

impl Adder {
    fn new(backend: &dyn GpuBackend) -> Self {
        let spec = Spec { act: DType::F32, weight: DType::F32 };
        // A row of A or B takes 8 elements.
        let mut ones = [0f32; 16];
        (ones[0], ones[8]) = (1.0, 1.0);
        let weights = upload(backend, bytemuck::cast_slice(&ones));
        let cells = [weights.ptr().0, weights.ptr().0 + 32];
        let mut tables: Vec<u32> = cells.iter().flat_map(|c| [*c as u32, (*c >> 32) as u32]).collect();
        tables.extend([1, 1f32.to_bits()]);
        Self {
            shrink: backend.load(Kernel::BgmvShrink, spec).unwrap(),
            expand: backend.load(Kernel::BgmvExpand, spec).unwrap(),
            fixed: [
                upload(backend, bytemuck::cast_slice(&[0, 1f32.to_bits()])),
                upload(backend, bytemuck::cast_slice(&tables)),
                weights,
            ],
            x: backend.alloc(4, "x").unwrap(),
            z: backend.alloc(4, "z").unwrap(),
            y: backend.alloc(4, "y").unwrap(),
        }
    }

    fn encode(&self, encoder: &mut dyn Encoder) -> lorapool::Result<()> {
        let mut params = Params { rows: 1, slots: 1, slot_count: 1, sites: 1, in_features: 1, ..Params::default() };
        (params.x_stride, params.z_stride, params.a_stride, params.b_stride) = (1, 1, 8, 8);
        (params.max_rank, params.max_out) = (1, 1);
        params.site[0] = SiteParams { cells: 0, ranks: 4, scales: 5, span: 8, out_features: 1, ..Default::default() };
        let [batch, tables, weights] = self.fixed.clone();
        let operands = [batch, tables, weights, self.x.clone(), self.z.clone()];
        encoder.launch(&[Launch::new(&self.shrink, &operands, params)?])?;
        params.site[0].cells = 2;
        params.site[0].y_stride = 1;
        let [batch, tables, weights] = self.fixed.clone();
        let operands = [batch, tables, weights, self.z.clone(), self.y.clone()];
        encoder.launch(&[Launch::new(&self.expand, &operands, params)?])
    }

    fn set_x(&self, encoder: &mut dyn Encoder, value: f32) -> lorapool::Result<()> {
        encoder.write(&self.x, &value.to_le_bytes())
    }

    fn y(&self, backend: &dyn GpuBackend) -> f32 {
        bytemuck::pod_read_unaligned(&backend.read(&self.y).unwrap())
    }
}

#[test]
fn memory_is_zero_even_where_other_memory_was_freed() {
    let Some(backend) = backend() else { return };
    for _ in 0..4 {
        let dirty = upload(&backend, &[0xa5; 4096]);
        drop(dirty);
        let clean = backend.alloc(4093, "clean").unwrap();
        assert!(backend.read(&clean).unwrap().iter().all(|byte| *byte == 0));
    }
    let empty = backend.alloc(0, "empty").unwrap();
    assert!(backend.read(&empty).unwrap().is_empty());
}

#[test]
fn writes_and_copies_take_effect_in_order_and_reads_start_anywhere() {
    let Some(backend) = backend() else { return };
    let a = backend.alloc(64, "a").unwrap();
    let b = backend.alloc(64, "b").unwrap();
    let part = |region: &Region, at, len| region.slice(at, len).unwrap();
    backend
        .submit(&mut |encoder| {
            encoder.write(&a, &[1; 64])?;
            encoder.copy(&part(&b, 0, 32), &part(&a, 32, 32))?;
            encoder.write(&part(&a, 16, 32), &[2; 32])?;
            encoder.copy(&part(&b, 32, 32), &part(&a, 16, 32))?;
            encoder.write(&part(&b, 60, 4), &[3; 4])?;
            encoder.copy(&part(&a, 0, 8), &part(&b, 56, 8))
        })
        .unwrap();
    let mut want_b = [[1u8; 32], [2; 32]].concat();
    want_b[60..].fill(3);
    assert_eq!(backend.read(&b).unwrap(), want_b);
    let want_a = [&[2u8; 4][..], &[3; 4], &[1; 8], &[2; 32], &[1; 16]].concat();
    assert_eq!(backend.read(&a).unwrap(), want_a);
    assert_eq!(backend.read(&part(&a, 3, 15)).unwrap(), want_a[3..18]);
}

#[test]
fn a_write_larger_than_any_staging_chunk_arrives_whole() {
    let Some(backend) = backend() else { return };
    let bytes: Vec<u8> = (0..(34 << 20) / 4u32).flat_map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let region = upload(&backend, &bytes);
    assert!(backend.read(&region).unwrap() == bytes);
}

#[test]
fn a_graph_that_is_pending_runs_again_after_itself() {
    let Some(backend) = backend() else { return };
    let adder = Adder::new(&backend);
    let mut bytes = 3f32.to_le_bytes();
    let graph = backend
        .capture(&mut |encoder| {
            encoder.write(&adder.x, &bytes)?;
            adder.encode(encoder)
        })
        .unwrap();
    assert_eq!(adder.y(&backend), 0.0, "capturing runs nothing");
    // The graph has its own copy of what was written.
    bytes.fill(0xff);
    let mut last = Default::default();
    for i in 0..100 {
        if i % 10 == 0 {
            backend.submit(&mut |encoder| adder.set_x(encoder, 1000.0)).unwrap();
        }
        let ticket = graph.replay().unwrap();
        assert!(ticket > last);
        last = ticket;
    }
    backend.wait(last).unwrap();
    assert!(backend.completed().unwrap() >= last);
    assert_eq!(adder.y(&backend), 300.0);
}

#[test]
fn a_pending_graph_keeps_its_memory_when_everyone_else_drops_it() {
    let Some(backend) = backend() else { return };
    let adder = Adder::new(&backend);
    let y = adder.y.clone();
    let graph = backend
        .capture(&mut |encoder| {
            adder.set_x(encoder, 1.0)?;
            adder.encode(encoder)
        })
        .unwrap();
    drop(adder);
    for _ in 0..20 {
        graph.replay().unwrap();
        upload(&backend, &[0xff; 64]);
    }
    drop(graph);
    for _ in 0..20 {
        upload(&backend, &[0xff; 4096]);
    }
    assert_eq!(bytemuck::pod_read_unaligned::<f32>(&backend.read(&y).unwrap()), 20.0);
}

#[test]
fn memory_dropped_while_it_is_being_recorded_lives_until_the_work_is_done() {
    let Some(backend) = backend() else { return };
    let out = backend.alloc(1 << 16, "out").unwrap();
    for round in 0..20u8 {
        backend
            .submit(&mut |encoder| {
                let source = backend.alloc(1 << 16, "source")?;
                encoder.write(&source, &vec![round; 1 << 16])?;
                encoder.copy(&out, &source)?;
                drop(source);
                // Would take the freed memory, and be cleared before the copy.
                backend.alloc(1 << 16, "other").map(drop)
            })
            .unwrap();
        assert!(backend.read(&out).unwrap().iter().all(|byte| *byte == round));
    }
}

#[test]
fn threads_submit_and_allocate_at_once() {
    let Some(backend) = backend() else { return };
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let backend = &backend;
            scope.spawn(move || {
                let adder = Adder::new(backend);
                for _ in 0..50 {
                    let ticket = backend
                        .submit(&mut |encoder| {
                            adder.set_x(encoder, thread as f32)?;
                            adder.encode(encoder)
                        })
                        .unwrap();
                    if ticket.0 % 7 == 0 {
                        backend.wait(ticket).unwrap();
                    }
                }
                assert_eq!(adder.y(backend), 50.0 * thread as f32);
            });
        }
    });
}

#[test]
fn a_recording_that_fails_sends_nothing() {
    let Some(backend) = backend() else { return };
    let region = upload(&backend, &[7; 16]);
    let before = backend.submit(&mut |_| Ok(())).unwrap();
    let failed = backend.submit(&mut |encoder| {
        encoder.write(&region, &[9; 16])?;
        encoder.write(&region, &[9; 20])
    });
    assert!(matches!(failed, Err(Error::OutOfBounds { .. })), "{failed:?}");
    assert_eq!(backend.submit(&mut |_| Ok(())).unwrap().0, before.0 + 1);
    assert_eq!(backend.read(&region).unwrap(), [7; 16]);
}

#[test]
fn limits_are_errors_with_the_numbers() {
    let Some(backend) = backend() else { return };
    let limit = backend.caps().max_alloc;
    let error = backend.alloc(limit + 1, "too much").unwrap_err();
    assert_eq!(error.code(), "E_LIMIT", "{error}");
    let error = backend.wait(lorapool::backend::Ticket(1 << 40)).unwrap_err();
    assert_eq!(error.code(), "E_SHAPE", "{error}");
    let error = VulkanBackend::open(1000).unwrap_err();
    assert_eq!(error.code(), "E_UNAVAILABLE", "{error}");
}

#[test]
fn memory_and_kernels_of_another_device_are_refused() {
    let (Some(one), Some(other)) = (backend(), backend()) else { return };
    let (here, there) = (one.alloc(16, "here").unwrap(), other.alloc(16, "there").unwrap());
    assert_eq!(one.submit(&mut |encoder| encoder.copy(&here, &there)).unwrap_err().code(), "E_SHAPE");
    assert_eq!(one.read(&there).unwrap_err().code(), "E_SHAPE");
    let adder = Adder::new(&other);
    assert_eq!(one.submit(&mut |encoder| adder.encode(encoder)).unwrap_err().code(), "E_SHAPE");
}

/// What a host engine has: an instance, a device with a queue, and a buffer.
struct Host {
    _entry: ash::Entry,
    device: HostDevice,
    buffer: vk::Buffer,
    memory: vk::DeviceMemory,
    address: vk::DeviceAddress,
}

impl Host {
    /// `None` where no device could be adopted.
    fn new() -> Option<Self> {
        vulkan::devices().ok()?;
        // SAFETY: plain Vulkan, each call with complete structures and handles made just before.
        unsafe {
            let entry = ash::Entry::load().ok()?;
            let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_2);
            let info = vk::InstanceCreateInfo::default().application_info(&application);
            let instance = entry.create_instance(&info, None).unwrap();
            let physical = instance.enumerate_physical_devices().unwrap()[0];
            let queues = [vk::DeviceQueueCreateInfo::default().queue_family_index(0).queue_priorities(&[1.0])];
            let mut features =
                vk::PhysicalDeviceVulkan12Features::default().buffer_device_address(true).timeline_semaphore(true);
            let info = vk::DeviceCreateInfo::default().queue_create_infos(&queues).push_next(&mut features);
            let device = instance.create_device(physical, &info, None).unwrap();
            let queue = device.get_device_queue(0, 0);
            let info = vk::BufferCreateInfo::default().size(256).usage(
                vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS
                    | vk::BufferUsageFlags::TRANSFER_SRC
                    | vk::BufferUsageFlags::TRANSFER_DST,
            );
            let buffer = device.create_buffer(&info, None).unwrap();
            let needs = device.get_buffer_memory_requirements(buffer);
            let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
            let info = vk::MemoryAllocateInfo::default()
                .allocation_size(needs.size)
                .memory_type_index(needs.memory_type_bits.trailing_zeros())
                .push_next(&mut flags);
            let memory = device.allocate_memory(&info, None).unwrap();
            device.bind_buffer_memory(buffer, memory, 0).unwrap();
            let address = device.get_buffer_device_address(&vk::BufferDeviceAddressInfo::default().buffer(buffer));
            let device = HostDevice {
                instance,
                api_version: vk::API_VERSION_1_2,
                physical_device: physical,
                device,
                queue,
                queue_family: 0,
                queue_lock: Arc::new(Mutex::new(())),
            };
            Some(Self { _entry: entry, device, buffer, memory, address })
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // SAFETY: the test has dropped all that was made from these.
        unsafe {
            self.device.device.device_wait_idle().unwrap();
            self.device.device.destroy_buffer(self.buffer, None);
            self.device.device.free_memory(self.memory, None);
            self.device.device.destroy_device(None);
            self.device.instance.destroy_instance(None);
        }
    }
}

#[test]
fn on_a_hosts_device_work_goes_into_the_hosts_command_buffer_and_memory() {
    let Some(host) = Host::new() else { return };
    // SAFETY: `host` outlives all made here (dropped last), has the features, and its queue is used below
    // only with the lock held.
    let backend = unsafe { VulkanBackend::adopt(host.device.clone()) }.unwrap();
    // SAFETY: the buffer is the host's own, of 256 bytes, and only this test uses it.
    let y = unsafe { backend.import(host.buffer, host.address, 256) }.unwrap();
    // SAFETY: as above, but with a length that must be refused.
    assert_eq!(unsafe { backend.import(host.buffer, host.address, 255) }.unwrap_err().code(), "E_SHAPE");
    let mut adder = Adder::new(&backend);
    adder.y = y.slice(4, 4).unwrap();
    let device = &host.device.device;
    // SAFETY: plain Vulkan as in `Host::new`; the recording is dropped after the queue is idle.
    unsafe {
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(0);
        let pool = device.create_command_pool(&info, None).unwrap();
        let info = vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
        let commands = device.allocate_command_buffers(&info).unwrap()[0];
        device.begin_command_buffer(commands, &vk::CommandBufferBeginInfo::default()).unwrap();
        // The host's own kernel before ours: y = 2.0 everywhere; and after ours: y[2] = y[1].
        device.cmd_fill_buffer(commands, host.buffer, 0, 256, 2f32.to_bits());
        let recording = backend
            .encode_on(commands, &mut |encoder| {
                adder.set_x(encoder, 5.0)?;
                adder.encode(encoder)?;
                adder.encode(encoder)
            })
            .unwrap();
        device.cmd_copy_buffer(
            commands,
            host.buffer,
            host.buffer,
            &[vk::BufferCopy { src_offset: 4, dst_offset: 8, size: 4 }],
        );
        device.end_command_buffer(commands).unwrap();
        {
            let _turn = host.device.queue_lock.lock().unwrap();
            let commands = [commands];
            let submit = [vk::SubmitInfo::default().command_buffers(&commands)];
            device.queue_submit(host.device.queue, &submit, vk::Fence::null()).unwrap();
            device.queue_wait_idle(host.device.queue).unwrap();
        }
        drop(recording);
        device.destroy_command_pool(pool, None);
    }
    let values = DType::F32.decode(&backend.read(&y).unwrap());
    assert_eq!(values[..4], [2.0, 12.0, 12.0, 2.0]);
    drop((adder, y, backend));
}
