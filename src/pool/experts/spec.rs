//! What a pool of experts is made for.

use crate::adapter::{Adapter, BaseModel, ExpertLinear, ExpertPair, SiteId};
use crate::contract::{MAX_RANK, STRIDE_ALIGN};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::pool::Part;

/// A linear of a routed layer that each expert has for itself, and its shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertSite {
    /// Which: `model.layers.0.mlp.experts.gate_up_proj`.
    pub id: SiteId,
    /// Number of experts.
    pub experts: u32,
    /// Elements of an input row.
    pub in_features: u32,
    /// Elements of an output row.
    pub out_features: u32,
}

/// What a pool of experts is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertSpec {
    /// Every routed linear that any adapter may ever cover, in the order of their indices.
    pub sites: Vec<ExpertSite>,
    /// Largest rank of an expert's pair, 1..=512. Rows of B take this many elements, rounded up to 8.
    pub max_rank: u32,
    /// Bytes of pairs that one adapter may have: see [`ExpertSpec::adapter_bytes`].
    pub slot_bytes: u64,
}

impl ExpertSpec {
    /// A pool for just these adapters, sized for the largest of them; `None` where none has experts.
    ///
    /// # Errors
    /// [`Error::Shape`] when two adapters disagree on the shape of a routed linear.
    pub fn for_adapters<'a>(adapters: impl IntoIterator<Item = &'a Adapter>, dtype: DType) -> Result<Option<Self>> {
        let adapters: Vec<&Adapter> = adapters.into_iter().collect();
        let mut pairs: Vec<&ExpertPair> = adapters.iter().flat_map(|adapter| &adapter.experts).collect();
        if pairs.is_empty() {
            return Ok(None);
        }
        pairs.sort_by(|a, b| a.site.cmp(&b.site));
        let max_rank = pairs.iter().map(|pair| pair.rank()).max().unwrap_or(1) as u32;
        let mut sites: Vec<ExpertSite> = Vec::new();
        for pair in pairs {
            let site = ExpertSite {
                id: pair.site.clone(),
                experts: pair.experts,
                in_features: pair.in_features() as u32,
                out_features: pair.out_features() as u32,
            };
            let Some(last) = sites.last_mut().filter(|last| last.id == site.id) else {
                sites.push(site);
                continue;
            };
            if (last.in_features, last.out_features) != (site.in_features, site.out_features) {
                return Err(Error::shape(
                    format!("experts of {}", site.id.path),
                    format!("{} -> {}", site.in_features, site.out_features),
                    format!("{} -> {}, as another pair has it", last.in_features, last.out_features),
                ));
            }
            last.experts = last.experts.max(site.experts);
        }
        let mut spec = Self { sites, max_rank, slot_bytes: 0 };
        spec.slot_bytes = adapters.iter().map(|adapter| spec.adapter_bytes(adapter, dtype)).max().unwrap_or(0);
        Ok(Some(spec))
    }

    /// A pool for any adapter of a base with up to `slot_bytes` of pairs; `None` where the base has no routed layer.
    pub fn for_base(base: &BaseModel, max_rank: u32, slot_bytes: u64) -> Option<Self> {
        let site = |linear: &ExpertLinear| ExpertSite {
            id: linear.site.clone(),
            experts: linear.experts as u32,
            in_features: linear.in_features as u32,
            out_features: linear.out_features as u32,
        };
        let sites: Vec<_> = base.experts().iter().map(site).collect();
        (!sites.is_empty()).then_some(Self { sites, max_rank, slot_bytes })
    }

    /// The same over every routed linear of `base`: a later adapter may cover what no earlier one did.
    pub fn over(self, base: &BaseModel) -> Self {
        let Self { sites, max_rank, slot_bytes } = self;
        let mut all = Self::for_base(base, max_rank, slot_bytes).map_or_else(Vec::new, |spec| spec.sites);
        // What the base doesn't show stays.
        all.extend(sites.into_iter().filter(|site| base.expert(&site.id.path).is_none()));
        Self { sites: all, max_rank, slot_bytes }
    }

    /// Bytes that an adapter's pairs take in a slot: for each, A and B with rows for `max_rank`, rounded up to 8.
    pub fn adapter_bytes(&self, adapter: &Adapter, dtype: DType) -> u64 {
        let bytes = |pair: &ExpertPair| {
            let (inputs, outputs) = (pair.in_features() as u64, pair.out_features() as u64);
            self.matrix_bytes(inputs, outputs, Part::A, dtype) + self.matrix_bytes(inputs, outputs, Part::B, dtype)
        };
        adapter.experts.iter().map(bytes).sum()
    }

    /// Elements between rows of B.
    pub(crate) fn b_stride(&self) -> u32 {
        self.max_rank.next_multiple_of(STRIDE_ALIGN)
    }

    /// Bytes of one matrix of one expert.
    pub(super) fn part_bytes(&self, site: &ExpertSite, part: Part, dtype: DType) -> u64 {
        self.matrix_bytes(site.in_features.into(), site.out_features.into(), part, dtype)
    }

    fn matrix_bytes(&self, inputs: u64, outputs: u64, part: Part, dtype: DType) -> u64 {
        let stride = u64::from(self.b_stride());
        let elements = match part {
            Part::A => stride * inputs.next_multiple_of(STRIDE_ALIGN.into()),
            Part::B => outputs * stride,
        };
        elements * dtype.size()
    }

    /// The larger matrix of a site.
    pub(super) fn largest(&self, site: &ExpertSite, dtype: DType) -> u64 {
        [Part::A, Part::B].map(|part| self.part_bytes(site, part, dtype)).into_iter().max().unwrap_or(0)
    }

    pub(super) fn check_rank(&self) -> Result<()> {
        if self.max_rank == 0 || self.max_rank > MAX_RANK {
            let (found, limit) = (self.max_rank.into(), MAX_RANK.into());
            return Err(Error::Limit { what: "max_rank of experts", found, limit, hint: " (it is 1..=512)" });
        }
        Ok(())
    }
}
