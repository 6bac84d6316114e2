//! A small model, and adapters for it that are told apart by name and version.

use std::sync::Arc;

use lorapool::DType;
use lorapool::adapter::{Adapter, HostMatrix, HostPair, LoraModule, RowVectors, SiteId};
use lorapool::pool::{PoolSpec, SiteSpec};
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus as Rng;

/// Versions of each adapter that come and go.
pub const VERSIONS: u32 = 4;
/// Rank that the pool has room for.
pub const MAX_RANK: u32 = 16;
/// Type of activations and weights.
pub const DTYPE: DType = DType::Bf16;

/// Sites of the model: shapes that share words, pad rows and split groups.
pub fn spec(max_loras: u32) -> PoolSpec {
    use LoraModule::{DownProj, GateProj, KProj, OProj, QProj, UpProj, VProj};
    let shapes = [
        (QProj, 72, 131),
        (KProj, 72, 33),
        (VProj, 72, 40),
        (OProj, 131, 72),
        (GateProj, 72, 96),
        (UpProj, 72, 96),
        (DownProj, 96, 72),
    ];
    let site = |layer: usize, (module, in_features, out_features): (LoraModule, u32, u32)| {
        let path = format!("model.layers.{layer}.{module}").into();
        SiteSpec::linear(SiteId { layer, module, path }, in_features, out_features)
    };
    let sites = (0..2).flat_map(|layer| shapes.clone().map(|shape| site(layer, shape))).collect();
    PoolSpec { sites, max_rank: MAX_RANK, max_loras, dtype: DTYPE, vectors: true }
}

/// Random bytes of `count` activations or weights in -1..1.
pub fn values(rng: &mut Rng, count: usize) -> Vec<u8> {
    let values: Vec<f32> = (0..count).map(|_| rng.random_range(-1.0..1.0)).collect();
    let mut bytes = Vec::new();
    DTYPE.encode(&values, &mut bytes);
    bytes
}

/// Adapter `name` in version `version`: its own sites, ranks and scales.
pub fn adapter(spec: &PoolSpec, name: u32, version: u32) -> Arc<Adapter> {
    let mut rng = Rng::seed_from_u64(u64::from(name) << 32 | u64::from(version));
    let mut pairs = Vec::new();
    for site in &spec.sites {
        // Coverage differs from version to version: a swap adds sites and drops others.
        if !pairs.is_empty() && rng.random_bool(0.3) {
            continue;
        }
        let rank = rng.random_range(1..=MAX_RANK) as usize;
        let (inputs, outputs) = (site.in_features as usize, site.out_features as usize);
        let mut matrix = |rows, cols| HostMatrix { dtype: DTYPE, rows, cols, bytes: values(&mut rng, rows * cols) };
        let (a, b) = (matrix(rank, inputs), matrix(outputs, rank));
        let vectors = rng.random_bool(0.5).then(|| RowVectors {
            gain: (0..outputs).map(|_| rng.random_range(0.5..1.5)).collect(),
            offset: (0..outputs).map(|_| rng.random_range(-1.0..1.0)).collect(),
        });
        pairs.push(HostPair { vectors, ..HostPair::new(site.id.clone(), a, b, rng.random_range(0.1..2.0)) });
    }
    Arc::new(Adapter::from_pairs(pairs))
}
