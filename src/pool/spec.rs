//! What a pool is made for: the sites of a model, and how much room each slot has there.

use crate::adapter::{Adapter, BaseModel, HostPair, Linear, LoraModule, SiteId};
use crate::dtype::DType;
use crate::error::{Error, Result};

use super::{Layout, Limits, SiteShape};
use crate::backend::WeightLayout;

/// A site and its shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteSpec {
    /// Which site.
    pub id: SiteId,
    /// Elements of an input row.
    pub in_features: u32,
    /// Elements of an output row.
    pub out_features: u32,
}

impl SiteSpec {
    fn shape(&self, vectors: bool) -> SiteShape {
        let Self { id, in_features, out_features } = self;
        SiteShape { layer: id.layer, in_features: *in_features, out_features: *out_features, vectors }
    }
}

/// What a pool is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    /// Every site that any adapter may ever cover, in the order of their indices. Sites that share an
    /// input work best side by side.
    pub sites: Vec<SiteSpec>,
    /// Largest rank, 1..=512. Rows of B take this many elements, rounded up to 8; kernels read the true rank.
    pub max_rank: u32,
    /// Number of slots.
    pub max_loras: u32,
    /// Type that weights are stored in.
    pub dtype: DType,
    /// Whether slots have room for the gains and offsets of adapters with `lora_bias` or DoRA: 8 bytes for each output of
    /// each site, some 13 % of a slot of rank 16 in a 2-byte type, for linears as wide as they are high. Without it such
    /// adapters are refused.
    pub vectors: bool,
}

impl PoolSpec {
    /// A pool for just these adapters: the sites that any of them covers, the largest rank of all, vectors if any has them.
    ///
    /// # Errors
    /// [`Error::Shape`] when two adapters disagree on the shape of a site.
    pub fn for_adapters<'a>(
        adapters: impl IntoIterator<Item = &'a Adapter>,
        max_loras: u32,
        dtype: DType,
    ) -> Result<Self> {
        let mut pairs: Vec<&HostPair> = adapters.into_iter().flat_map(|a| &a.pairs).collect();
        let max_rank = pairs.iter().map(|p| p.rank()).max().unwrap_or(1) as u32;
        let vectors = pairs.iter().any(|p| p.vectors.is_some());
        pairs.sort_by(|a, b| a.site.cmp(&b.site));
        let mut sites: Vec<SiteSpec> = Vec::new();
        for pair in pairs {
            let site = SiteSpec {
                id: pair.site.clone(),
                in_features: pair.in_features() as u32,
                out_features: pair.out_features() as u32,
            };
            match sites.last() {
                Some(last) if last.id == site.id && *last != site => {
                    return Err(Error::shape(
                        format!("site {}", site.id.path),
                        format!("{} -> {}", site.in_features, site.out_features),
                        format!("{} -> {}, as another adapter has it", last.in_features, last.out_features),
                    ));
                }
                Some(last) if last.id == site.id => {}
                _ => sites.push(site),
            }
        }
        Ok(Self { sites, max_rank, max_loras, dtype, vectors })
    }

    /// A pool for any adapter of a base: every linear is a site, with room for vectors. Where no adapter will have
    /// `lora_bias` or DoRA, set [`PoolSpec::vectors`] to `false` and save that room.
    pub fn for_base(base: &BaseModel, max_rank: u32, max_loras: u32, dtype: DType) -> Self {
        let site = |linear: &Linear| SiteSpec {
            id: linear.site.clone(),
            in_features: linear.in_features as u32,
            out_features: linear.out_features as u32,
        };
        Self { sites: base.linears().iter().map(site).collect(), max_rank, max_loras, dtype, vectors: true }
    }

    /// Bytes of weights that such a pool takes, in all slots, where a device sets no limit to one block.
    ///
    /// # Errors
    /// [`Error::Limit`] when `max_rank` is not in 1..=512, or there is no slot.
    pub fn bytes(&self) -> Result<u64> {
        let shapes = self.shapes();
        let limits = Limits { order: WeightLayout::SlotMajor, max_alloc: u64::MAX, max_binding: u64::MAX };
        Ok(Layout::new(&shapes, self.max_rank, self.max_loras, self.dtype, limits)?.blocks().iter().sum())
    }

    /// The sites as a layout takes them.
    pub(super) fn shapes(&self) -> Vec<SiteShape> {
        self.sites.iter().map(|site| site.shape(self.vectors)).collect()
    }

    /// Sites that read one input, as far as their names say: q, k, v; gate, up. Every site is in one group.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for (i, site) in self.sites.iter().enumerate() {
            let joins = groups.last().is_some_and(|group| {
                let first = &self.sites[group[0]];
                first.id.layer == site.id.layer
                    && first.in_features == site.in_features
                    && input(&first.id.module).is_some_and(|i| Some(i) == input(&site.id.module))
            });
            match groups.last_mut() {
                Some(group) if joins => group.push(i),
                _ => groups.push(vec![i]),
            }
        }
        groups
    }
}

/// Which of a layer's inputs a module reads, where its name says so.
fn input(module: &LoraModule) -> Option<&'static str> {
    match module {
        LoraModule::QProj | LoraModule::KProj | LoraModule::VProj => Some("attention"),
        LoraModule::GateProj | LoraModule::UpProj => Some("feed-forward"),
        _ => None,
    }
}
