//! A resident adapter's pairs, by layer and module, as device addresses.

use std::collections::BTreeMap;

use crate::adapter::{Adapter, HostTokens, LoraModule};
use crate::error::Result;
use crate::memory::DevicePtr;
use crate::pool::{Cell, Part, Pool, SiteSpec};

/// A weight matrix in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DenseWeight {
    /// Address of element 0.
    pub weight: DevicePtr,
}

/// One site's pair in the pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoraPair {
    /// `A[rank][k_in]`, rows `k_in` rounded up to 8 elements apart.
    pub a: DenseWeight,
    /// `B[n_out][rank]`, rows `max_rank` rounded up to 8 elements apart.
    pub b: DenseWeight,
    /// True rank: what kernels compute with.
    pub rank: usize,
    /// Columns of A.
    pub k_in: usize,
    /// Rows of B.
    pub n_out: usize,
    /// Scale of the delta at this site, patterns applied. Never folded into B.
    pub scale: f32,
    /// Rank that the slot has room for.
    pub max_rank: usize,
    /// Whether f32 gains and offsets, one an output, lie behind B's last row: see
    /// [`RANK_VECTORS`](crate::contract::RANK_VECTORS).
    pub vectors: bool,
}

/// Rows of an embedding or head that an adapter replaces, in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoraTokenRows {
    /// `ids[count]`, ascending u32, with the rows behind them: see [`SiteKind::TokenRows`](crate::pool::SiteKind).
    pub ids: DevicePtr,
    /// How many.
    pub count: usize,
    /// Elements of a row.
    pub width: usize,
}

/// One layer's pairs; modules that the adapter does not cover are absent.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraLayerWeights {
    /// Global layer index; modules outside of layers are in layer 0.
    pub layer_idx: usize,
    /// The pairs.
    pub pairs: BTreeMap<LoraModule, LoraPair>,
    /// Replaced rows.
    pub tokens: BTreeMap<LoraModule, LoraTokenRows>,
}

impl LoraLayerWeights {
    /// A layer that no module of the adapter touches.
    pub fn empty(layer_idx: usize) -> Self {
        Self { layer_idx, pairs: BTreeMap::new(), tokens: BTreeMap::new() }
    }

    /// The pair of `module`, if the adapter covers it.
    pub fn module_pair(&self, module: &LoraModule) -> Option<&LoraPair> {
        self.pairs.get(module)
    }
}

/// The layers that `adapter` has in `slot`: global-layer-indexed, None where it covers nothing.
pub(super) fn layers_of(pool: &Pool, slot: u32, adapter: &Adapter) -> Result<Vec<Option<LoraLayerWeights>>> {
    let mut layers = vec![None; layer_count(pool)];
    for pair in &adapter.pairs {
        let site = pool.fit(pair)?;
        let weight = |part| pool.part(slot, site, part).map(|r| DenseWeight { weight: r.ptr() });
        let layer = pair.site.layer;
        let entry = layers[layer].get_or_insert_with(|| LoraLayerWeights::empty(layer));
        entry.pairs.insert(
            pair.site.module.clone(),
            LoraPair {
                a: weight(Part::A)?,
                b: weight(Part::B)?,
                rank: pair.rank(),
                k_in: pair.in_features(),
                n_out: pair.out_features(),
                scale: pair.scale,
                max_rank: pool.layout().max_rank() as usize,
                vectors: pair.vectors.is_some(),
            },
        );
    }
    adapter.tokens.iter().try_for_each(|tokens| add_tokens(pool, slot, tokens, &mut layers))?;
    Ok(layers)
}

/// Adds replaced rows to a slot's layers.
pub(super) fn add_tokens(
    pool: &Pool,
    slot: u32,
    tokens: &HostTokens,
    layers: &mut [Option<LoraLayerWeights>],
) -> Result<()> {
    let site = pool.fit_tokens(tokens)?;
    let (layer, ids) = (tokens.site.layer, pool.part(slot, site, Part::A)?.ptr());
    let entry = layers[layer].get_or_insert_with(|| LoraLayerWeights::empty(layer));
    let rows = LoraTokenRows { ids, count: tokens.ids.len(), width: tokens.rows.cols };
    entry.tokens.insert(tokens.site.module.clone(), rows);
    Ok(())
}

/// Layers of the model, as far as the pool's sites tell.
pub(super) fn layer_count(pool: &Pool) -> usize {
    pool.sites().iter().map(|s| s.id.layer + 1).max().unwrap_or(0)
}

/// Table entries, one a site, that `layers` stand for.
pub(super) fn cells_of(pool: &Pool, layers: &[Option<LoraLayerWeights>]) -> Vec<Cell> {
    let cell = |layer: usize, module: &LoraModule| {
        let pair = layers.get(layer)?.as_ref()?.module_pair(module)?;
        let (a, b) = (pair.a.weight, pair.b.weight);
        Some(Cell { a, b, rank: pair.rank as u32, scale: pair.scale, vectors: pair.vectors })
    };
    let rows = |layer: usize, module: &LoraModule| {
        let rows = layers.get(layer)?.as_ref()?.tokens.get(module)?;
        Some(Cell { a: rows.ids, b: DevicePtr::NULL, rank: rows.count as u32, scale: 1.0, vectors: false })
    };
    let of_site = |site: &SiteSpec| match site.is_token_rows() {
        true => rows(site.id.layer, &site.id.module),
        false => cell(site.id.layer, &site.id.module),
    };
    pool.sites().iter().map(|site| of_site(site).unwrap_or(Cell::EMPTY)).collect()
}
