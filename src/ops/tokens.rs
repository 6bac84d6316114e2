//! Encodes the launches for embeddings and replaced token rows.

use std::collections::BTreeMap;

use super::applier::{Applier, Group, Op, Output};
use super::draft::{Draft, launch};
use super::join::join;
use super::matrix::Matrix;
use crate::backend::{Encoder, GpuBackend, Pipeline};
use crate::contract::{Kernel, Params, SiteParams, Spec};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::pool::{Capacity, Part, Pool, SiteKind, SiteSpec};

/// The kernels that a pool's embeddings and token rows need; none where it has none.
#[derive(Debug, Default)]
pub(super) struct TokenPipelines {
    embed: Option<Pipeline>,
    /// By the type of the rows: overlay_embed and overlay_logits.
    overlay: BTreeMap<DType, [Pipeline; 2]>,
}

impl TokenPipelines {
    pub fn new(backend: &dyn GpuBackend, pool: &Pool, spec: Spec) -> Result<Self> {
        let mut found = Self::default();
        for site in pool.sites() {
            match site.kind {
                SiteKind::Linear => {}
                SiteKind::Embedding if found.embed.is_some() => {}
                SiteKind::Embedding => found.embed = Some(backend.load(Kernel::EmbedShrink, spec)?),
                SiteKind::TokenRows { dtype, .. } if found.overlay.contains_key(&dtype) => {}
                SiteKind::TokenRows { dtype, .. } => {
                    let load = |kernel| backend.load(kernel, Spec { weight: dtype, ..spec });
                    found.overlay.insert(dtype, [load(Kernel::OverlayEmbed)?, load(Kernel::OverlayLogits)?]);
                }
            }
        }
        Ok(found)
    }
}

/// What a kernel of replaced rows reads.
#[derive(Clone, Copy)]
enum Input<'a> {
    Ids(&'a Region),
    X(&'a Matrix),
}

impl Applier {
    /// Records, for up to `capacity` rows of the batch that is written when it runs, `y[row] += scale * B * A[:, ids[row]]`
    /// at an embedding: what LoRA adds to its gathered rows, before any scaling of them. `ids` holds a u32 a row.
    ///
    /// Rows past the batch's end, rows of slot -1, and rows whose adapter lacks the site keep their bits, and their ids
    /// are not read. An id that is no row of the embedding adds `scale * B * 0`: y stays, but for -0.0 and NaN payloads.
    ///
    /// # Errors
    /// [`Error::Shape`] when the site is no embedding, or `ids` or y are too small; as [`Applier::encode`] otherwise.
    pub fn encode_embedding(
        &self,
        encoder: &mut dyn Encoder,
        pool: &Pool,
        op: Op,
        capacity: Capacity,
        ids: &Region,
        output: Output<'_>,
    ) -> Result<()> {
        self.check_capacity(capacity)?;
        let spec = site(pool, output.site)?;
        let Some(embed) = self.tokens.embed.as_ref().filter(|_| spec.kind == SiteKind::Embedding) else {
            return Err(wrong_kind(spec, "an embedding"));
        };
        if op.has_none(capacity) {
            return Ok(());
        }
        check_ids(ids, capacity.rows)?;
        let act = self.spec.act;
        output.y.check(&format!("y of {}", spec.id.path), capacity.rows, spec.out_features, act)?;
        let (joined, at) = join(&[output], &[spec.out_features], capacity.rows, act, self.bindings.align)?;
        let group = Group { sites: vec![output.site], x: None, in_features: spec.in_features, joined, at };
        let step = self.rows_at_once(pool, &group, 0)?;
        let layout = pool.layout();
        let batch = self.batch.slice(0, capacity.bytes())?;
        for first in (0..capacity.rows).step_by(step as usize) {
            let rows = step.min(capacity.rows - first);
            let common = Params {
                rows,
                row_first: first,
                slots: layout.slots(),
                in_features: spec.in_features,
                b_stride: layout.b_stride(),
                z_stride: layout.max_rank(),
                max_rank: layout.max_rank(),
                tiles_at: capacity.tiles_at(),
                tiles: if op == Op::Sgmv { capacity.tiles } else { 0 },
                counts_at: if op == Op::Sgmv { capacity.counts_at() } else { 0 },
                packs_at: if op == Op::Bgmv { capacity.packs_at() } else { 0 },
                ..Params::default()
            };
            for part in [Part::A, Part::B] {
                let mut drafts: Vec<Draft> = layout
                    .windows(&group.sites, part)
                    .iter()
                    .map(|window| self.draft(pool, &group, part, window, &batch, common))
                    .collect::<Result<_>>()?;
                if part == Part::A {
                    let ids = ids.slice(u64::from(first) * 4, u64::from(rows) * 4)?;
                    drafts.iter_mut().for_each(|(operands, _)| operands.insert(3, ids.clone()));
                }
                let pipeline = if part == Part::A { embed } else { self.pairs.of(part, op) };
                launch(encoder, pipeline, &drafts)?;
            }
        }
        Ok(())
    }

    /// Records, for up to `capacity` rows of the batch that is written when it runs, `y[row] = rows[j]` where `ids[row]` is
    /// the j-th token that the row's adapter replaces: to be done on what was gathered from an embedding, before any
    /// scaling of it. `output.site` is a site for token rows, y as wide as a row of its table; `ids` holds a u32 a row.
    ///
    /// All other rows keep their bits. Neither the adapter's scale nor the row's own changes a replaced row.
    ///
    /// # Errors
    /// [`Error::Shape`] when the site holds no token rows, or `ids` or y are too small; [`Error::Limit`] beyond
    /// [`Applier::capacity`].
    pub fn encode_token_rows(
        &self,
        encoder: &mut dyn Encoder,
        pool: &Pool,
        capacity: Capacity,
        ids: &Region,
        output: Output<'_>,
    ) -> Result<()> {
        check_ids(ids, capacity.rows)?;
        self.overlay(encoder, pool, capacity, Input::Ids(ids), output)
    }

    /// Records, for up to `capacity` rows of the batch that is written when it runs, `y[row][id] = rows[j] * x[row]` for
    /// each token id that the row's adapter replaces in a head: to be done on the logits, behind a head that has the
    /// base's rows there, before any scaling or capping of them. `output.site` is a site for token rows, y as wide as the
    /// vocabulary.
    ///
    /// All other logits keep their bits. Neither the adapter's scale nor the row's own changes a replaced one.
    ///
    /// # Errors
    /// [`Error::Shape`] when the site holds no token rows, or x or y are too small; [`Error::Limit`] beyond
    /// [`Applier::capacity`].
    pub fn encode_logits(
        &self,
        encoder: &mut dyn Encoder,
        pool: &Pool,
        capacity: Capacity,
        x: &Matrix,
        output: Output<'_>,
    ) -> Result<()> {
        self.overlay(encoder, pool, capacity, Input::X(x), output)
    }

    fn overlay(
        &self,
        encoder: &mut dyn Encoder,
        pool: &Pool,
        capacity: Capacity,
        input: Input<'_>,
        output: Output<'_>,
    ) -> Result<()> {
        self.check_capacity(capacity)?;
        let spec = site(pool, output.site)?;
        let SiteKind::TokenRows { capacity: most, dtype } = spec.kind else {
            return Err(wrong_kind(spec, "a site for token rows"));
        };
        let Some([embed, logits]) = self.tokens.overlay.get(&dtype) else {
            return Err(Error::shape("pool", "not the one that this applier was made for", "that one"));
        };
        if capacity.rows == 0 {
            return Ok(());
        }
        let (act, layout) = (self.spec.act, pool.layout());
        let (pipeline, width) = match input {
            Input::Ids(_) => (embed, spec.in_features),
            Input::X(_) => (logits, spec.out_features),
        };
        output.y.check(&format!("y of {}", spec.id.path), capacity.rows, width, act)?;
        if let Input::X(x) = input {
            x.check("x", capacity.rows, spec.in_features, act)?;
        }
        let batch = self.batch.slice(0, capacity.bytes())?;
        let tables = pool.tables().site(output.site);
        let group = Group {
            sites: vec![output.site],
            x: match input {
                Input::Ids(_) => None,
                Input::X(x) => Some(x),
            },
            in_features: spec.in_features,
            joined: join(&[output], &[width], capacity.rows, act, self.bindings.align)?.0,
            at: Vec::new(),
        };
        let step = self.rows_at_once(pool, &group, 0)?;
        for first in (0..capacity.rows).step_by(step as usize) {
            let rows = step.min(capacity.rows - first);
            let read = match input {
                Input::Ids(ids) => ids.slice(u64::from(first) * 4, u64::from(rows) * 4)?,
                Input::X(x) => x.rows(first, rows, spec.in_features, act)?,
            };
            let draft = |window: &crate::pool::Window| -> Result<Draft> {
                let mut params = Params {
                    rows,
                    row_first: first,
                    slots: layout.slots(),
                    slot_first: window.slots.start,
                    slot_count: window.slots.end - window.slots.start,
                    sites: 1,
                    in_features: spec.in_features,
                    x_stride: group.x.map_or(0, Matrix::stride),
                    a_stride: layout.a_stride(output.site),
                    max_rank: most,
                    ..Params::default()
                };
                params.site[0] = SiteParams {
                    cells: tables.a,
                    ranks: tables.ranks,
                    scales: tables.scales,
                    span: (layout.part_bytes(output.site, Part::A) / 4) as u32,
                    out_features: spec.out_features,
                    y_stride: output.y.stride(),
                    ..SiteParams::default()
                };
                let weights = pool.region(window.place)?;
                let y = output.y.rows(first, rows, width, act)?;
                Ok((vec![batch.clone(), pool.tables().region().clone(), weights, read.clone(), y], params))
            };
            let windows = layout.windows(&group.sites, Part::A);
            launch(encoder, pipeline, &windows.iter().map(draft).collect::<Result<Vec<_>>>()?)?;
        }
        Ok(())
    }
}

fn site(pool: &Pool, index: usize) -> Result<&SiteSpec> {
    let known = pool.sites().get(index);
    known.ok_or_else(|| Error::shape("site of an output", index, format!("an index below {}", pool.sites().len())))
}

fn wrong_kind(spec: &SiteSpec, expected: &str) -> Error {
    Error::shape(format!("site {}", spec.id.path), format!("{:?}", spec.kind), expected)
}

fn check_ids(ids: &Region, rows: u32) -> Result<()> {
    if ids.len() < u64::from(rows) * 4 || !ids.offset().is_multiple_of(4) {
        let found = format!("{} bytes at offset {}", ids.len(), ids.offset());
        return Err(Error::shape("ids", found, format!("{rows} u32 at a multiple of 4")));
    }
    Ok(())
}
