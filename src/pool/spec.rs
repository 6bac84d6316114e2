//! What a pool is made for: the sites of a model, and how much room each slot has there.

use crate::adapter::{Adapter, BaseModel, Embedding, HostPair, HostTokens, Linear, LoraModule, SiteId};
use crate::dtype::DType;
use crate::error::{Error, Result};

use super::{Layout, Limits, SiteKind, SiteShape};
use crate::backend::WeightLayout;

/// A site and its shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteSpec {
    /// Which site.
    pub id: SiteId,
    /// What it is. A path may have a site for LoRA and one for token rows.
    pub kind: SiteKind,
    /// Elements of an input row; of an embedding the vocabulary; of token rows the width of one.
    pub in_features: u32,
    /// Elements of an output row; of token rows the vocabulary.
    pub out_features: u32,
}

impl SiteSpec {
    /// A linear.
    pub fn linear(id: SiteId, in_features: u32, out_features: u32) -> Self {
        Self { id, kind: SiteKind::Linear, in_features, out_features }
    }

    /// An embedding of `vocabulary` rows, `width` wide.
    pub fn embedding(id: SiteId, vocabulary: u32, width: u32) -> Self {
        Self { id, kind: SiteKind::Embedding, in_features: vocabulary, out_features: width }
    }

    /// Room for `capacity` replaced rows, in `dtype`, of an embedding or head of `vocabulary` rows, `width` wide.
    pub fn token_rows(id: SiteId, vocabulary: u32, width: u32, capacity: u32, dtype: DType) -> Self {
        Self { id, kind: SiteKind::TokenRows { capacity, dtype }, in_features: width, out_features: vocabulary }
    }

    /// Whether it holds token rows, and not A and B.
    pub fn is_token_rows(&self) -> bool {
        matches!(self.kind, SiteKind::TokenRows { .. })
    }

    fn shape(&self, vectors: bool) -> SiteShape {
        let Self { kind, in_features, out_features, .. } = *self;
        // Only linears have gains and offsets.
        let vectors = vectors && kind == SiteKind::Linear;
        SiteShape { layer: self.id.layer, kind, in_features, out_features, vectors }
    }

    fn of_pair(pair: &HostPair) -> Self {
        let kind = if pair.embedding { SiteKind::Embedding } else { SiteKind::Linear };
        let (in_features, out_features) = (pair.in_features() as u32, pair.out_features() as u32);
        Self { id: pair.site.clone(), kind, in_features, out_features }
    }

    fn of_tokens(tokens: &HostTokens) -> Self {
        let (vocabulary, width, capacity) =
            (tokens.vocabulary as u32, tokens.rows.cols as u32, tokens.ids.len() as u32);
        Self::token_rows(tokens.site.clone(), vocabulary, width, capacity.max(1), tokens.rows.dtype)
    }

    /// Makes this site fit what `other` is made for, if both are of one shape.
    fn widen(&mut self, other: &Self) -> bool {
        if let (SiteKind::TokenRows { capacity, dtype }, SiteKind::TokenRows { capacity: more, dtype: theirs }) =
            (&mut self.kind, other.kind)
        {
            *capacity = (*capacity).max(more);
            // f32 holds what either of two 2-byte types does.
            *dtype = if *dtype == theirs { *dtype } else { DType::F32 };
            return (self.in_features, self.out_features) == (other.in_features, other.out_features);
        }
        self == other
    }
}

/// Token rows that a slot has room for in each table, where nothing else is said.
pub const TOKEN_ROWS: u32 = 256;

/// What a pool is made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSpec {
    /// Every site that any adapter may ever cover, in the order of their indices. Sites that share an
    /// input work best side by side.
    pub sites: Vec<SiteSpec>,
    /// Largest rank, 1..=512. Rows of B take this many elements, rounded up to 8; kernels read the true rank. CUDA's
    /// decode from compute capability 9.0 on, in bf16, is fastest for adapters of this very rank where it is 8, 16, 32 or 64.
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
    /// A pool for just these adapters: the sites that any of them covers, the largest rank of all, vectors if any has them,
    /// as many token rows as any of them has.
    ///
    /// # Errors
    /// [`Error::Shape`] when two adapters disagree on the shape of a site, or it is not yet known which token rows one of
    /// them replaces ([`Adapter::raw_tokens`]).
    pub fn for_adapters<'a>(
        adapters: impl IntoIterator<Item = &'a Adapter>,
        max_loras: u32,
        dtype: DType,
    ) -> Result<Self> {
        let (mut max_rank, mut vectors) = (1, false);
        let mut wanted: Vec<SiteSpec> = Vec::new();
        for adapter in adapters {
            if let Some(raw) = adapter.raw_tokens.first() {
                let expected = "an adapter loaded with its base, which tells them";
                return Err(Error::shape(format!("token rows of {}", raw.site.path), "not known yet", expected));
            }
            max_rank = max_rank.max(adapter.max_rank() as u32);
            vectors |= adapter.pairs.iter().any(|pair| pair.vectors.is_some());
            wanted.extend(adapter.pairs.iter().map(SiteSpec::of_pair));
            wanted.extend(adapter.tokens.iter().map(SiteSpec::of_tokens));
        }
        wanted.sort_by(|a, b| a.id.cmp(&b.id).then(a.is_token_rows().cmp(&b.is_token_rows())));
        let mut sites: Vec<SiteSpec> = Vec::new();
        for site in wanted {
            let same = |last: &&mut SiteSpec| last.id == site.id && last.is_token_rows() == site.is_token_rows();
            let Some(last) = sites.last_mut().filter(same) else {
                sites.push(site);
                continue;
            };
            if !last.widen(&site) {
                return Err(Error::shape(
                    format!("site {}", site.id.path),
                    format!("{} -> {}", site.in_features, site.out_features),
                    format!("{} -> {}, as another adapter has it", last.in_features, last.out_features),
                ));
            }
        }
        Ok(Self { sites, max_rank, max_loras, dtype, vectors })
    }

    /// A pool for any adapter of a base: every linear is a site, with room for vectors. Where no adapter will have
    /// `lora_bias` or DoRA, set [`PoolSpec::vectors`] to `false` and save that room.
    ///
    /// Its embeddings are sites too, and the input embedding and the head have room for [`TOKEN_ROWS`] replaced rows, kept
    /// in the type of the base's own table (f32 where that is not known). In every slot an embedding takes `vocabulary * max_rank` elements, which for 128k tokens and rank 64 is 16 MiB in a
    /// 2-byte type, and the two tables take 256 rows each: see [`PoolSpec::without_embeddings`],
    /// [`PoolSpec::without_token_rows`], [`PoolSpec::with_token_rows`].
    pub fn for_base(base: &BaseModel, max_rank: u32, max_loras: u32, dtype: DType) -> Self {
        let linear = |l: &Linear| SiteSpec::linear(l.site.clone(), l.in_features as u32, l.out_features as u32);
        let embedding = |e: &Embedding| SiteSpec::embedding(e.site.clone(), e.vocabulary as u32, e.width as u32);
        let mut sites: Vec<SiteSpec> = base.linears().iter().map(linear).collect();
        sites.extend(base.embeddings().iter().map(embedding));
        let tables = base.input_embedding().map(|e| (&e.site, e.vocabulary, e.width));
        let tables = tables.into_iter().chain(base.head().map(|h| (&h.site, h.out_features, h.in_features)));
        sites.extend(tables.map(|(site, vocabulary, width)| {
            let dtype = base.dtype(&site.path).unwrap_or(DType::F32);
            SiteSpec::token_rows(site.clone(), vocabulary as u32, width as u32, TOKEN_ROWS, dtype)
        }));
        Self { sites, max_rank, max_loras, dtype, vectors: true }
    }

    /// Without room for LoRA on embeddings; an adapter that has any is then refused.
    pub fn without_embeddings(mut self) -> Self {
        self.sites.retain(|site| site.kind != SiteKind::Embedding);
        self
    }

    /// Without room for replaced token rows; an adapter that has any is then refused.
    pub fn without_token_rows(mut self) -> Self {
        self.sites.retain(|site| !site.is_token_rows());
        self
    }

    /// With room for `rows` replaced token rows in each table that has any.
    pub fn with_token_rows(mut self, rows: u32) -> Self {
        for site in &mut self.sites {
            if let SiteKind::TokenRows { capacity, .. } = &mut site.kind {
                *capacity = rows;
            }
        }
        self
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

    /// Linear sites that read one input, as far as their names say: q, k, v; gate, up. Every linear site is in one group,
    /// no other is in any.
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for (i, site) in self.sites.iter().enumerate().filter(|(_, site)| site.kind == SiteKind::Linear) {
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
