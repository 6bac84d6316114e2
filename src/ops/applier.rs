//! Encodes the launches that add each row's own delta to the outputs of some sites.

use super::Matrix;
use super::draft::{Bindings, Draft, PairPipelines, launch};
use super::join::{At, Joined, join};
use super::scratch::Scratch;
use super::tokens::TokenPipelines;
use crate::backend::{Encoder, GpuBackend};
use crate::contract::{MAX_SITES, Params, SiteParams, Spec};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::pool::{Capacity, Part, Plan, Pool, SiteKind, Window};

/// Which kernels apply the adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Op {
    /// Each row by itself, for decode.
    Bgmv,
    /// Tiles of neighbouring rows with one slot, for prefill.
    Sgmv,
}

impl Op {
    /// Both ops.
    pub const ALL: [Op; 2] = [Op::Bgmv, Op::Sgmv];

    /// `bgmv` or `sgmv`.
    pub const fn name(self) -> &'static str {
        match self {
            Op::Bgmv => "bgmv",
            Op::Sgmv => "sgmv",
        }
    }

    /// Whether no batch of `capacity` gives it anything to do.
    pub(super) fn has_none(self, capacity: Capacity) -> bool {
        capacity.rows == 0
            || match self {
                Op::Bgmv => capacity.packs == 0,
                Op::Sgmv => capacity.tiles == 0,
            }
    }
}

/// A site of a call, and its output.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    /// Index of the site in the pool.
    pub site: usize,
    /// `y[rows][out_features]`: the base's output, to which the delta is added.
    pub y: &'a Matrix,
}

/// Compiled kernels, scratch and the batch table for one activation type: all that a step needs, at
/// fixed addresses. Steps that may run at once each need their own.
#[derive(Debug)]
pub struct Applier {
    pub(super) spec: Spec,
    pub(super) pairs: PairPipelines,
    pub(super) tokens: TokenPipelines,
    pub(super) batch: Region,
    scratch: Scratch,
    capacity: Capacity,
    pub(super) bindings: Bindings,
}

/// One group of sites in one call, resolved.
pub(super) struct Group<'a> {
    pub(super) sites: Vec<usize>,
    /// What is read in rows of `in_features` elements; an embedding reads none.
    pub(super) x: Option<&'a Matrix>,
    pub(super) in_features: u32,
    pub(super) joined: Vec<Joined>,
    pub(super) at: Vec<At>,
}

impl Applier {
    /// Compiles the kernels and allocates scratch for batches of up to `capacity`.
    ///
    /// # Errors
    /// The backend's.
    pub fn new(backend: &dyn GpuBackend, pool: &Pool, act: DType, capacity: Capacity) -> Result<Self> {
        let bytes = Scratch::bytes(capacity.rows, 1, pool.layout().max_rank());
        Self::with_scratch(backend, pool, act, capacity, bytes)
    }

    /// The same with `scratch` bytes for rank-space values: `MAX_SITES * max_rank * 4` bytes let a row
    /// pass at a time, that many times the rows let all pass in one launch.
    ///
    /// # Errors
    /// The backend's; [`Error::Limit`] when `scratch` is less than one row's.
    pub fn with_scratch(
        backend: &dyn GpuBackend,
        pool: &Pool,
        act: DType,
        capacity: Capacity,
        scratch: u64,
    ) -> Result<Self> {
        let scratch = Scratch::new(backend, pool.layout().max_rank(), scratch, "rank-space scratch")?;
        let spec = Spec { act, weight: pool.layout().dtype() };
        Ok(Self {
            spec,
            pairs: PairPipelines::new(backend, spec)?,
            tokens: TokenPipelines::new(backend, pool, spec)?,
            batch: backend.alloc(capacity.bytes(), "batch")?,
            scratch,
            capacity,
            bindings: Bindings::of(backend.caps()),
        })
    }

    /// Type of x and y.
    pub fn act(&self) -> DType {
        self.spec.act
    }

    /// The largest batch.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Records the write of a batch for launches that were, or will be, encoded for `capacity`: this very one, since where
    /// tiles and packs lie in the batch depends on it.
    ///
    /// # Errors
    /// [`Error::Limit`] when `plan` exceeds `capacity` or that exceeds [`Applier::capacity`].
    pub fn write_batch(&self, encoder: &mut dyn Encoder, plan: &Plan, capacity: Capacity) -> Result<()> {
        self.check_capacity(capacity)?;
        encoder.write(&self.batch, &plan.encode(capacity)?)
    }

    /// Records, for up to `capacity` rows of the batch that is written when it runs,
    /// `y[row] += scale * B * A * x[row]` at each of `outputs`, which all read `x`.
    ///
    /// Rows past the batch's end, rows of slot -1, and rows whose adapter lacks a site keep their bits.
    ///
    /// # Errors
    /// [`Error::Shape`] when the sites' inputs differ, a matrix is too small, or outputs overlap;
    /// [`Error::Limit`] beyond [`Applier::capacity`] or when one row exceeds a device's binding.
    pub fn encode(
        &self,
        encoder: &mut dyn Encoder,
        pool: &Pool,
        op: Op,
        capacity: Capacity,
        x: &Matrix,
        outputs: &[Output<'_>],
    ) -> Result<()> {
        self.check_capacity(capacity)?;
        if op.has_none(capacity) {
            return Ok(());
        }
        outputs.chunks(MAX_SITES).try_for_each(|outputs| {
            let group = self.group(pool, capacity.rows, x, outputs)?;
            let step = self.rows_at_once(pool, &group, self.scratch.parts(op))?;
            (0..capacity.rows).step_by(step as usize).try_for_each(|first| {
                let rows = step.min(capacity.rows - first);
                self.encode_rows(encoder, pool, op, capacity, &group, first, rows)
            })
        })
    }

    /// The batch of a step, as [`Applier::write_batch`] writes it for `capacity`.
    pub(crate) fn batch(&self, capacity: Capacity) -> Result<Region> {
        self.check_capacity(capacity)?;
        self.batch.slice(0, capacity.bytes())
    }

    pub(super) fn check_capacity(&self, capacity: Capacity) -> Result<()> {
        capacity.check_within(self.capacity, "")
    }

    /// Checks a call's shapes and sorts its outputs into operands.
    fn group<'a>(&self, pool: &Pool, rows: u32, x: &'a Matrix, outputs: &[Output<'_>]) -> Result<Group<'a>> {
        let spec = |o: &Output<'_>| {
            let known = pool.sites().get(o.site);
            known.ok_or_else(|| {
                Error::shape("site of an output", o.site, format!("an index below {}", pool.sites().len()))
            })
        };
        let act = self.spec.act;
        let in_features = spec(&outputs[0])?.in_features;
        let mut widths = Vec::with_capacity(outputs.len());
        for output in outputs {
            let site = spec(output)?;
            if site.kind != SiteKind::Linear {
                let found = format!("{:?}", site.kind);
                return Err(Error::shape(format!("site {}", site.id.path), found, "a linear, which reads x"));
            }
            if site.in_features != in_features {
                let found = format!("in_features {}", site.in_features);
                return Err(Error::shape(
                    format!("site {}", site.id.path),
                    found,
                    format!("{in_features}, as its group"),
                ));
            }
            output.y.check(&format!("y of {}", site.id.path), rows, site.out_features, act)?;
            widths.push(site.out_features);
        }
        x.check("x", rows, in_features, act)?;
        let (joined, at) = join(outputs, &widths, rows, act, self.bindings.align)?;
        Ok(Group { sites: outputs.iter().map(|o| o.site).collect(), x: Some(x), in_features, joined, at })
    }

    /// Rows that one launch can take: as many as scratch and the device's bindings hold.
    pub(super) fn rows_at_once(&self, pool: &Pool, group: &Group<'_>, z_parts: u32) -> Result<u32> {
        let x = group.x.map(|x| (x, group.in_features));
        let matrices = group.joined.iter().map(|j| (&j.matrix, j.width)).chain(x);
        let rows = self.scratch.rows(group.sites.len() as u64, pool.layout().max_rank(), z_parts);
        let rows = self.bindings.rows(matrices, self.spec.act, rows)?;
        Ok(rows.min(u64::from(u32::MAX)) as u32)
    }

    /// All launches of a group for rows `first..first + rows`: shrinks, then expands.
    #[allow(clippy::too_many_arguments)]
    fn encode_rows(
        &self,
        encoder: &mut dyn Encoder,
        pool: &Pool,
        op: Op,
        capacity: Capacity,
        group: &Group<'_>,
        first: u32,
        rows: u32,
    ) -> Result<()> {
        let layout = pool.layout();
        let common = Params {
            rows,
            row_first: first,
            slots: layout.slots(),
            in_features: group.in_features,
            x_stride: group.x.map_or(0, Matrix::stride),
            b_stride: layout.b_stride(),
            z_stride: group.sites.len() as u32 * layout.max_rank(),
            max_rank: layout.max_rank(),
            tiles_at: capacity.tiles_at(),
            tiles: if op == Op::Sgmv { capacity.tiles } else { 0 },
            counts_at: if op == Op::Sgmv { capacity.counts_at() } else { 0 },
            packs_at: if op == Op::Bgmv { capacity.packs_at() } else { 0 },
            z_parts: self.scratch.parts(op),
            ..Params::default()
        };
        let batch = self.batch.slice(0, capacity.bytes())?;
        for part in [Part::A, Part::B] {
            let drafts: Vec<Draft> = layout
                .windows(&group.sites, part)
                .iter()
                .map(|window| self.draft(pool, group, part, window, &batch, common))
                .collect::<Result<_>>()?;
            launch(encoder, self.pairs.of(part, op), &drafts)?;
        }
        Ok(())
    }

    /// Operands and parameters of the launch for one window of the pool.
    pub(super) fn draft(
        &self,
        pool: &Pool,
        group: &Group<'_>,
        part: Part,
        window: &Window,
        batch: &Region,
        mut params: Params,
    ) -> Result<Draft> {
        let act = self.spec.act;
        let layout = pool.layout();
        let mut operands = vec![batch.clone(), pool.tables().region().clone(), pool.region(window.place)?];
        if let (Part::A, Some(x)) = (part, group.x) {
            operands.push(x.rows(params.row_first, params.rows, group.in_features, act)?);
        }
        operands.push(self.scratch.region().clone());
        params.slot_first = window.slots.start;
        params.slot_count = window.slots.end - window.slots.start;
        params.sites = window.sites.len() as u32;
        let mut used: Vec<u32> = Vec::new(); // y operands in the order of this launch
        for (entry, i) in params.site.iter_mut().zip(window.sites.clone()) {
            let site = group.sites[i];
            let at = group.at[i];
            let tables = pool.tables().site(site);
            let y_operand = used.iter().position(|o| *o == at.operand).unwrap_or_else(|| {
                used.push(at.operand);
                used.len() - 1
            });
            let joined = &group.joined[at.operand as usize];
            *entry = SiteParams {
                cells: if part == Part::A { tables.a } else { tables.b },
                ranks: tables.ranks,
                scales: tables.scales,
                span: (layout.part_bytes(site, part) / 4) as u32,
                out_features: pool.sites()[site].out_features,
                y_operand: y_operand as u32,
                y_offset: at.offset,
                y_stride: joined.matrix.stride(),
                z_offset: i as u32 * layout.max_rank(),
                ..SiteParams::default()
            };
            params.a_stride = layout.a_stride(site);
            params.max_out = params.max_out.max(entry.out_features);
        }
        if part == Part::B {
            for operand in used {
                let joined = &group.joined[operand as usize];
                operands.push(joined.matrix.rows(params.row_first, params.rows, joined.width, act)?);
            }
        }
        Ok((operands, params))
    }
}
