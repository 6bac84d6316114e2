//! A backend under trial, and an adapter on it whose work is easy to foretell.

use std::sync::Arc;

use lorapool::backend::{Encoder, GpuBackend, Launch, Pipeline};
use lorapool::contract::{Kernel, Params, RowRef, SiteParams, Spec};
use lorapool::{Allocation, DType, Region, Result};

/// A backend under trial.
pub struct Bench {
    pub name: &'static str,
    pub backend: Arc<dyn GpuBackend>,
}

impl Bench {
    pub fn upload(&self, bytes: &[u8]) -> Result<Region> {
        let region = self.backend.alloc(bytes.len() as u64, "test")?;
        self.backend.submit(&mut |encoder| encoder.write(&region, bytes))?;
        Ok(region)
    }

    pub fn floats(&self, region: &Region) -> Result<Vec<f32>> {
        Ok(DType::F32.decode(&self.backend.read(region)?))
    }
}

/// Width and rank of the adapter below.
pub const WIDTH: u32 = 8;
pub const BYTES: u64 = WIDTH as u64 * 4;

/// One row, one site, and an adapter whose A and B are identities: `y += x`, exactly.
pub struct Rig {
    pub shrink: Pipeline,
    pub expand: Pipeline,
    pub params: Params,
    pub fixed: [Region; 3],
    pub x: Region,
    pub z: Region,
    pub y: Region,
}

impl Rig {
    pub fn new(bench: &Bench) -> Result<Self> {
        let spec = Spec { act: DType::F32, weight: DType::F32 };
        let identity = |scale: f32| (0..64).map(move |i| if i % 9 == 0 { scale } else { 0.0 });
        let weights: Vec<f32> = identity(1.0).chain(identity(1.0)).collect();
        let weights = bench.upload(bytemuck::cast_slice(&weights))?;
        let (a, b) = (weights.ptr().0, weights.ptr().0 + 256);
        let tables = [a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32, WIDTH, 1f32.to_bits(), 0, 0];
        let batch = [RowRef { slot: 0, scale: 1.0 }; 2];
        let fixed =
            [bench.upload(bytemuck::cast_slice(&batch))?, bench.upload(bytemuck::cast_slice(&tables))?, weights];
        let site =
            SiteParams { ranks: 4, scales: 5, span: 64, out_features: WIDTH, y_stride: WIDTH, ..SiteParams::default() };
        let params = Params {
            rows: 1,
            slots: 1,
            slot_count: 1,
            sites: 1,
            in_features: WIDTH,
            x_stride: WIDTH,
            a_stride: WIDTH,
            b_stride: WIDTH,
            z_stride: WIDTH,
            max_rank: WIDTH,
            max_out: WIDTH,
            site: [site, SiteParams::default(), SiteParams::default(), SiteParams::default()],
            ..Params::default()
        };
        let alloc = |label| bench.backend.alloc(BYTES, label);
        Ok(Self {
            shrink: bench.backend.load(Kernel::BgmvShrink, spec)?,
            expand: bench.backend.load(Kernel::BgmvExpand, spec)?,
            params,
            fixed,
            x: alloc("x")?,
            z: alloc("z")?,
            y: alloc("y")?,
        })
    }

    /// Records `y += x`.
    pub fn add(&self, encoder: &mut dyn Encoder) -> Result<()> {
        let operands = |vector: &Region, out: &Region| {
            let [batch, tables, weights] = self.fixed.clone();
            [batch, tables, weights, vector.clone(), out.clone()]
        };
        let shrink = operands(&self.x, &self.z);
        encoder.launch(&[Launch::new(&self.shrink, &shrink, self.params)?])?;
        let mut params = self.params;
        params.site[0].cells = 2;
        let expand = operands(&self.z, &self.y);
        encoder.launch(&[Launch::new(&self.expand, &expand, params)?])
    }
}

/// The bytes of a row whose elements are `value`, `value + 1`, ...
pub fn row(value: f32) -> Vec<u8> {
    let values: Vec<f32> = (0..WIDTH).map(|i| value + i as f32).collect();
    bytemuck::cast_slice(&values).to_vec()
}

/// The elements of the sum of `count` rows whose first elements add up to `first`.
pub fn sum(first: f32, count: u32) -> Vec<f32> {
    (0..WIDTH).map(|i| first + (count * i) as f32).collect()
}

pub fn code<T>(result: Result<T>) -> &'static str {
    result.map_or_else(|error| error.code(), |_| "no error")
}

/// Memory of no backend.
#[derive(Debug)]
pub struct Foreign;

impl Allocation for Foreign {
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}
