//! A captured step over the model, replayed for batch after batch.

use std::sync::Arc;

use lorapool::backend::{GpuBackend, Graph};
use lorapool::ops::{Applier, Matrix, Op, Output};
use lorapool::pool::{Capacity, Plan, Pool};
use lorapool::{Region, Result};
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus as Rng;

use super::model::{DTYPE, values};

/// Rows of a batch.
pub const ROWS: u32 = 24;

/// One thread's step: inputs and base outputs that never change, outputs, and the graph that computes them.
pub struct Lane {
    gpu: Arc<dyn GpuBackend>,
    applier: Applier,
    graph: Box<dyn Graph>,
    outputs: Vec<(Matrix, u32)>,
    base: Vec<Vec<u8>>,
}

impl Lane {
    /// Captures the step for `op`. Every row of a batch has the same input and base output.
    pub fn new(gpu: &Arc<dyn GpuBackend>, pool: &Pool, op: Op) -> Result<Self> {
        let capacity = Capacity::any(ROWS);
        let applier = Applier::new(&**gpu, pool, DTYPE, capacity)?;
        let mut rng = Rng::seed_from_u64(1);
        let mut upload = |width: u32| -> Result<(Region, Vec<u8>)> {
            let row = values(&mut rng, width as usize);
            let bytes = row.repeat(ROWS as usize);
            let region = gpu.alloc(bytes.len() as u64, "activations")?;
            gpu.submit(&mut |encoder| encoder.write(&region, &bytes))?;
            Ok((region, row))
        };
        let mut inputs = Vec::new();
        let (mut base, mut origins, mut outputs) = (Vec::new(), Vec::new(), Vec::new());
        for site in pool.sites() {
            let (origin, row) = upload(site.out_features)?;
            let output = gpu.alloc(origin.len(), "outputs")?;
            base.push(row);
            outputs.push((Matrix::new(output, site.out_features), site.out_features));
            origins.push(origin);
        }
        let groups = pool.spec().groups();
        for group in &groups {
            let width = pool.sites()[group[0]].in_features;
            inputs.push(Matrix::new(upload(width)?.0, width));
        }
        let graph = gpu.capture(&mut |encoder| {
            for (origin, (output, _)) in origins.iter().zip(&outputs) {
                encoder.copy(output.region(), origin)?;
            }
            for (group, x) in groups.iter().zip(&inputs) {
                let targets: Vec<Output<'_>> = group.iter().map(|&site| Output { site, y: &outputs[site].0 }).collect();
                applier.encode(encoder, pool, op, capacity, x, &targets)?;
            }
            Ok(())
        })?;
        Ok(Self { gpu: gpu.clone(), applier, graph, outputs, base })
    }

    /// Replays the step for a batch; call between a step's begin and end.
    pub fn replay(&self, plan: &Plan) -> Result<()> {
        let capacity = self.applier.capacity();
        self.gpu.submit(&mut |encoder| self.applier.write_batch(encoder, plan, capacity))?;
        self.graph.replay().map(|_| ())
    }

    /// Each row's outputs, site after site.
    pub fn rows(&self) -> Result<Vec<Vec<u8>>> {
        let mut rows = vec![Vec::new(); ROWS as usize];
        for (matrix, width) in &self.outputs {
            let bytes = self.gpu.read(matrix.region())?;
            for (row, part) in rows.iter_mut().zip(bytes.chunks(*width as usize * DTYPE.size() as usize)) {
                row.extend_from_slice(part);
            }
        }
        Ok(rows)
    }

    /// What a row of the base is.
    pub fn base(&self) -> Vec<u8> {
        self.base.concat()
    }
}
