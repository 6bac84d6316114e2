//! Encodes the launches of routed layers: each row's expert's delta, of its token's own adapter.
//!
//! A routed layer computes rows of a token and one of its experts. [`ExpertApplier::encode_rows`] makes a batch of such
//! rows on the device, from what the router left there and the batch of the step's tokens; then
//! [`ExpertApplier::encode`] adds deltas at any of the layer's linears, gate and up before the activation, down before the
//! weighted sum. Nothing of it depends on the routing, so a captured graph serves any.

use super::draft::{Bindings, Draft, PairPipelines, launch};
use super::join::join;
use super::scratch::Scratch;
use super::{Applier, Matrix, Op, Output};
use crate::backend::{Encoder, GpuBackend, Launch, Pipeline};
use crate::contract::{
    Kernel, MAX_SITES, Params, ROUTED_OFFSETS, ROUTED_TOKENS, RowRef, SGMV_TILE_ROWS, SiteParams, Spec, THREADS,
};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::pool::{Capacity, ExpertPool, ExpertWindow, Part};

/// Which expert each row has, as u32 in device memory.
#[derive(Clone, Copy, Debug)]
pub enum Experts<'a> {
    /// `[rows]`: of each row. A number past the last expert is none.
    ByRow(&'a Region),
    /// `[experts + 1]`: the first row of each expert, and the end of the last one's; rows are sorted by expert.
    Offsets(&'a Region),
}

/// Where a routed layer's rows come from.
#[derive(Clone, Copy, Debug)]
pub struct Routing<'a> {
    /// Rows: those of all tokens, in decode; sorted ones, with any that are padding, in prefill.
    pub rows: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Rows of each token: row `i` is token `i / top_k`'s, unless `places` say otherwise.
    pub top_k: u32,
    /// The rows' experts.
    pub expert: Experts<'a>,
    /// `[rows]` u32 in device memory: row `i` is token `places[i] / top_k`'s; a token that isn't there is none. With a
    /// `top_k` of 1 these are tokens; with the layer's own they are places in the unsorted order.
    pub places: Option<&'a Region>,
}

/// What a linear of a routed layer reads.
#[derive(Clone, Copy, Debug)]
pub enum ExpertInput<'a> {
    /// `x[tokens][in_features]`: each row its token's, as gate and up do.
    Tokens(&'a Matrix),
    /// `x[rows][in_features]`: each row its own, as down does.
    Rows(&'a Matrix),
}

/// Compiled kernels, scratch and the batch of rows for one activation type, at fixed addresses. Layers that may run at
/// once each need their own.
#[derive(Debug)]
pub struct ExpertApplier {
    spec: Spec,
    pairs: PairPipelines,
    rows: Pipeline,
    tiles: Pipeline,
    batch: Region,
    scratch: Scratch,
    capacity: u32,
    bindings: Bindings,
}

/// Words of the batch for `rows` rows: entries, tiles, rows of x, counts of tiles.
struct Places {
    tiles_at: u32,
    x_rows_at: u32,
    counts_at: u32,
    words: u64,
}

impl Places {
    fn of(rows: u32) -> Self {
        // Rows and tiles as in any batch; in place of packs, rows of x.
        let capacity = Capacity::any(rows);
        let (tiles_at, x_rows_at) = (capacity.tiles_at(), capacity.packs_at());
        let counts_at = x_rows_at + rows;
        Self { tiles_at, x_rows_at, counts_at, words: u64::from(counts_at) + 1 + u64::from(rows.div_ceil(THREADS)) }
    }
}

/// Sites of one call, resolved.
struct Group<'a> {
    sites: Vec<usize>,
    x: &'a Matrix,
    /// Rows of x that rows name; 0: each has its own.
    tokens: u32,
    in_features: u32,
    joined: Vec<super::join::Joined>,
    at: Vec<super::join::At>,
}

impl ExpertApplier {
    /// Compiles the kernels and allocates scratch for up to `rows` rows: tokens times experts a token.
    ///
    /// # Errors
    /// The backend's; [`Error::Limit`] for more rows than a batch counts.
    pub fn new(backend: &dyn GpuBackend, pool: &ExpertPool, act: DType, rows: u32) -> Result<Self> {
        let bytes = Scratch::bytes(rows, SGMV_TILE_ROWS, pool.spec().max_rank);
        Self::with_scratch(backend, pool, act, rows, bytes)
    }

    /// The same with `scratch` bytes for rank-space values: `MAX_SITES * max_rank * 4` for each row that passes at a time;
    /// tiles pass in sixteens.
    ///
    /// # Errors
    /// The backend's; [`Error::Limit`] when `scratch` is less than one row's.
    pub fn with_scratch(
        backend: &dyn GpuBackend,
        pool: &ExpertPool,
        act: DType,
        rows: u32,
        scratch: u64,
    ) -> Result<Self> {
        let most = u32::MAX / 8;
        if rows > most {
            let (found, limit) = (rows.into(), most.into());
            return Err(Error::Limit { what: "rows of a routed layer", found, limit, hint: "" });
        }
        let scratch = Scratch::new(backend, pool.spec().max_rank, scratch, "rank-space scratch of experts")?;
        let spec = Spec { act, weight: pool.dtype() };
        Ok(Self {
            spec,
            pairs: PairPipelines::new(backend, spec)?,
            rows: backend.load(Kernel::ExpertRows, spec)?,
            tiles: backend.load(Kernel::ExpertTiles, spec)?,
            batch: backend.alloc((Places::of(rows).words * 4).max(16), "batch of experts")?,
            scratch,
            capacity: rows,
            bindings: Bindings::of(backend.caps()),
        })
    }

    /// The most rows.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Records the making of a routed layer's batch from that of the step's tokens, as written when it runs
    /// ([`Applier::write_batch`]): row by row the token's adapter and multiplier, and the expert. Rows of tokens of the
    /// base, without an expert, or without a token get no delta. `op`: the one that the deltas are to be added with.
    ///
    /// # Errors
    /// [`Error::Limit`] beyond [`ExpertApplier::capacity`] or the tokens' own; [`Error::Shape`] for memory that is too
    /// small, or experts that the pool does not have.
    pub fn encode_rows(
        &self,
        encoder: &mut dyn Encoder,
        op: Op,
        pool: &ExpertPool,
        tokens: &Applier,
        capacity: Capacity,
        routing: &Routing<'_>,
    ) -> Result<()> {
        self.check_rows(routing.rows)?;
        if routing.rows == 0 {
            return Ok(());
        }
        let batch = tokens.batch(capacity)?;
        let places = Places::of(routing.rows);
        let mut params = Params {
            rows: routing.rows,
            slots: pool.slots(),
            experts: routing.experts,
            top_k: routing.top_k,
            slot_stride: pool.slot_stride(),
            x_rows: capacity.rows,
            x_rows_at: places.x_rows_at,
            counts_at: if op == Op::Sgmv { places.counts_at } else { 0 },
            ..Params::default()
        };
        let experts = match routing.expert {
            Experts::ByRow(region) => region,
            Experts::Offsets(region) => {
                params.routed |= ROUTED_OFFSETS;
                region
            }
        };
        // An empty batch is no operand.
        let batch = batch.slice(0, u64::from(capacity.rows) * size_of::<RowRef>() as u64)?;
        let rows = self.batch.slice(0, places.words * 4)?;
        let mut operands = vec![batch, experts.clone(), rows.clone()];
        if let Some(region) = routing.places {
            params.routed |= ROUTED_TOKENS;
            operands.push(region.clone());
        }
        encoder.launch(&[Launch::new(&self.rows, &operands, params)?])?;
        if op == Op::Bgmv {
            return Ok(());
        }
        let Places { tiles_at, counts_at, .. } = places;
        let params = Params { rows: routing.rows, tiles_at, tiles: routing.rows, counts_at, ..Params::default() };
        encoder.launch(&[Launch::new(&self.tiles, &[rows], params)?])
    }

    /// Records, for the `rows` rows that [`ExpertApplier::encode_rows`] was last recorded for, with the same `op`,
    /// `y[row] += scale * B[expert] * A[expert] * x` at each of `outputs`, sites of the expert pool that all read `x`.
    /// `tokens` is the number of rows of an x of tokens.
    ///
    /// Rows without an adapter or an expert, and rows whose adapter has nothing for their expert there, keep their bits.
    ///
    /// # Errors
    /// [`Error::Shape`] when the sites' inputs or experts differ, a matrix is too small, or outputs overlap;
    /// [`Error::Limit`] beyond [`ExpertApplier::capacity`] or a device's binding.
    #[allow(clippy::too_many_arguments)]
    pub fn encode(
        &self,
        encoder: &mut dyn Encoder,
        pool: &ExpertPool,
        op: Op,
        rows: u32,
        tokens: u32,
        x: ExpertInput<'_>,
        outputs: &[Output<'_>],
    ) -> Result<()> {
        self.check_rows(rows)?;
        if rows == 0 {
            return Ok(());
        }
        outputs.chunks(MAX_SITES).try_for_each(|outputs| {
            let group = self.group(pool, rows, tokens, x, outputs)?;
            let step = self.rows_at_once(pool, op, rows, &group)?;
            (0..rows).step_by(step as usize).try_for_each(|first| {
                self.encode_part(encoder, pool, op, rows, &group, (first, step.min(rows - first)))
            })
        })
    }

    fn check_rows(&self, rows: u32) -> Result<()> {
        match rows <= self.capacity {
            true => Ok(()),
            false => {
                let (found, limit) = (rows.into(), self.capacity.into());
                Err(Error::Limit { what: "rows of a routed layer", found, limit, hint: "" })
            }
        }
    }

    /// Checks a call's shapes and sorts its outputs into operands.
    fn group<'a>(
        &self,
        pool: &ExpertPool,
        rows: u32,
        tokens: u32,
        x: ExpertInput<'a>,
        outputs: &[Output<'_>],
    ) -> Result<Group<'a>> {
        let act = self.spec.act;
        let spec = |output: &Output<'_>| {
            let known = pool.sites().get(output.site);
            known.ok_or_else(|| {
                let expected = format!("an index below {}", pool.sites().len());
                Error::shape("site of an output of experts", output.site, expected)
            })
        };
        let first = spec(&outputs[0])?;
        let mut widths = Vec::with_capacity(outputs.len());
        for output in outputs {
            let site = spec(output)?;
            if (site.in_features, site.experts) != (first.in_features, first.experts) {
                let of = |in_features, experts| format!("in_features {in_features}, {experts} experts");
                return Err(Error::shape(
                    format!("experts of {}", site.id.path),
                    of(site.in_features, site.experts),
                    format!("{}, as its group", of(first.in_features, first.experts)),
                ));
            }
            output.y.check(&format!("y of {}", site.id.path), rows, site.out_features, act)?;
            widths.push(site.out_features);
        }
        let (x, tokens) = match x {
            ExpertInput::Tokens(x) => (x, tokens),
            ExpertInput::Rows(x) => (x, 0),
        };
        x.check("x of experts", if tokens == 0 { rows } else { tokens }, first.in_features, act)?;
        let (joined, at) = join(outputs, &widths, rows, act, self.bindings.align)?;
        let sites = outputs.iter().map(|output| output.site).collect();
        Ok(Group { sites, x, tokens, in_features: first.in_features, joined, at })
    }

    /// Rows that one launch can take: as many as scratch and the device's bindings hold; whole tiles in prefill.
    fn rows_at_once(&self, pool: &ExpertPool, op: Op, rows: u32, group: &Group<'_>) -> Result<u32> {
        let own_x = (group.tokens == 0).then_some((group.x, group.in_features));
        let matrices = group.joined.iter().map(|j| (&j.matrix, j.width)).chain(own_x);
        let scratch = self.scratch.rows(group.sites.len() as u64, pool.spec().max_rank, self.scratch.parts(op));
        let fit = self.bindings.rows(matrices, self.spec.act, scratch.min(rows.into()))? as u32;
        match op {
            Op::Sgmv if fit < rows && fit >= SGMV_TILE_ROWS => Ok(fit / SGMV_TILE_ROWS * SGMV_TILE_ROWS),
            _ => Ok(fit),
        }
    }

    /// All launches of a group for some of the rows: shrinks, then expands.
    fn encode_part(
        &self,
        encoder: &mut dyn Encoder,
        pool: &ExpertPool,
        op: Op,
        all: u32,
        group: &Group<'_>,
        (first, rows): (u32, u32),
    ) -> Result<()> {
        let places = Places::of(all);
        let max_rank = pool.spec().max_rank;
        let common = Params {
            rows,
            row_first: first,
            slots: group.sites.iter().map(|site| pool.entries(*site)).min().unwrap_or(0),
            in_features: group.in_features,
            x_stride: group.x.stride(),
            b_stride: pool.b_stride(),
            z_stride: group.sites.len() as u32 * max_rank,
            max_rank,
            tiles_at: places.tiles_at,
            // No tile is behind the place of its first row.
            tiles: if op == Op::Sgmv { first + rows } else { 0 },
            counts_at: if op == Op::Sgmv { places.counts_at } else { 0 },
            x_rows_at: if group.tokens == 0 { 0 } else { places.x_rows_at },
            x_rows: group.tokens,
            experts: pool.sites()[group.sites[0]].experts,
            z_parts: self.scratch.parts(op),
            ..Params::default()
        };
        let batch = self.batch.slice(0, places.words * 4)?;
        let windows = pool.windows();
        for part in [Part::A, Part::B] {
            let drafts: Vec<_> = windows
                .iter()
                .map(|window| self.draft(pool, group, part, window, &batch, common))
                .collect::<Result<_>>()?;
            launch(encoder, self.pairs.of(part, op), &drafts)?;
        }
        Ok(())
    }

    /// Operands and parameters of the launch for one window of the pool.
    fn draft(
        &self,
        pool: &ExpertPool,
        group: &Group<'_>,
        part: Part,
        window: &ExpertWindow,
        batch: &Region,
        mut params: Params,
    ) -> Result<Draft> {
        let act = self.spec.act;
        let mut operands = vec![batch.clone(), pool.tables().clone(), window.region.clone()];
        if part == Part::A {
            let (first, rows) = if group.tokens == 0 { (params.row_first, params.rows) } else { (0, group.tokens) };
            operands.push(group.x.rows(first, rows, group.in_features, act)?);
        }
        operands.push(self.scratch.region().clone());
        let stride = pool.slot_stride();
        params.slot_first = window.slots.start * stride;
        params.slot_count = ((window.slots.end - window.slots.start) * stride).min(params.slots - params.slot_first);
        params.sites = group.sites.len() as u32;
        let max_rank = params.max_rank;
        for ((i, entry), (site, at)) in params.site.iter_mut().enumerate().zip(group.sites.iter().zip(&group.at)) {
            let [a, b, ranks, scales] = pool.words(*site);
            *entry = SiteParams {
                cells: if part == Part::A { a } else { b },
                ranks,
                scales,
                span: (pool.part_bytes(*site, part) / 4) as u32,
                out_features: pool.sites()[*site].out_features,
                y_operand: at.operand,
                y_offset: at.offset,
                y_stride: group.joined[at.operand as usize].matrix.stride(),
                z_offset: i as u32 * max_rank,
                ..SiteParams::default()
            };
            params.a_stride = pool.a_stride(*site);
            params.max_out = params.max_out.max(entry.out_features);
        }
        if part == Part::B {
            for joined in &group.joined {
                operands.push(joined.matrix.rows(params.row_first, params.rows, joined.width, act)?);
            }
        }
        Ok((operands, params))
    }
}
