//! One case on one device, at the level of launches: memory laid out by hand, poisoned and guarded.
//!
//! What must not be read is NaN: pad columns of A and B, ranks beyond a pair's own, slots without a
//! pair, padding between rows of x, scratch that no shrink wrote. What must not be written is compared
//! bit by bit with what was there: rows without an adapter, padding of y, and guard bands around y and z
//! of finite values of the data's size, since a stray `+=` on a NaN would leave a NaN.

use super::case::{Case, Values, kernels};
use super::data::{Absent, Data, Dice, SHAPED_UNIT, Y_UNIT, Z_UNIT};
use super::operand::Operand;
use super::oracle::{Check, Mismatch, Oracle};
use super::window::Window;
use crate::backend::{Encoder, GpuBackend, Launch, Pipeline};
use crate::contract::{self, MAX_SITES, Pack, Params, RANK_VECTORS, RowRef, SiteParams, Tile};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Region;
use crate::pool::Plan;

/// What scratch holds before a shrink: a NaN of our own.
const SCRATCH: f32 = f32::from_bits(0x7fc0_beef);
/// Read-only operands up to this size are checked to be unchanged.
const SMALL: u64 = 1 << 18;

/// What a run left in memory: guards, padding and all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outputs {
    /// z's memory.
    pub z: Vec<u8>,
    /// Each y's memory.
    pub y: Vec<Vec<u8>>,
}

/// A case in a device's memory, ready to run any number of times.
#[derive(Debug)]
pub struct Rig<'b> {
    backend: &'b dyn GpuBackend,
    /// The case.
    pub case: Case,
    /// Its contents.
    pub data: Data,
    shrink: Pipeline,
    expand: Pipeline,
    /// Batch, tables, weights: regions and contents.
    fixed: [(Region, Vec<u8>); 3],
    x: Operand,
    z: Operand,
    y: Vec<Operand>,
    /// Scratch for z in parts, where the case has packs and the device leaves it so: then z means nothing.
    parts: Option<Region>,
    /// Word in the batch where the tiles are.
    tiles_at: u32,
    /// Word in the batch where the packs are; 0: nowhere.
    packs_at: u32,
    /// Word in the batch where rows of x are named; 0: nowhere.
    x_rows_at: u32,
    /// Word in the batch where the number of tiles in use is; 0: nowhere.
    counts_at: u32,
    /// Word offsets of each site's table arrays, y and z places filled in.
    sites: Vec<Tables>,
}

/// A site's place in tables, y and z.
#[derive(Clone, Copy, Debug)]
struct Tables {
    a_cells: u32,
    b_cells: u32,
    params: SiteParams,
}

impl<'b> Rig<'b> {
    /// Lays out `case` and uploads it.
    ///
    /// # Errors
    /// Those of allocation, compilation and upload.
    pub fn new(backend: &'b dyn GpuBackend, case: &Case) -> Result<Self> {
        Self::with_data(backend, case, Data::new(case))
    }

    /// As [`Rig::new`], with contents of one's own.
    ///
    /// # Errors
    /// Those of allocation, compilation and upload.
    pub fn with_data(backend: &'b dyn GpuBackend, case: &Case, data: Data) -> Result<Self> {
        let mut dice = Dice::new(0x9a7d);
        let mut grid = || dice.below(127) as f32 / 16.0;
        let (rows, sites) = (u64::from(case.rows), case.outs.len());
        let span = |stride: u64, width: u64| (rows - 1) * stride + width;
        let (width, pad) = (u64::from(case.in_features), u64::from(case.pad));

        let x_stride = width + pad;
        let shape = ((u64::from(case.x_rows()) - 1) * x_stride + width, x_stride, case.shift);
        let mut x = Operand::new(("x".into(), case.act), shape, || f32::NAN, || f32::NAN);
        for row in 0..case.x_rows() as usize {
            let mut bytes = Vec::new();
            case.act.encode(data.x_row(case, row), &mut bytes);
            let range = x.range(row, 0, width);
            x.image[range].copy_from_slice(&bytes);
        }

        let part = u64::from(case.max_rank) + pad;
        let z_stride = part * sites as u64;
        let shape = (span(z_stride, z_stride - pad), z_stride, case.shift);
        let mut z = Operand::new(("z".into(), DType::F32), shape, &mut grid, || SCRATCH);

        let mut places = Vec::new();
        let gap = pad.min(3);
        let (mut y, mut offset) = (Vec::new(), 0);
        for (site, out) in case.outs.iter().enumerate() {
            offset = if case.shared_y { offset } else { 0 } + gap;
            places.push((if case.shared_y { 0 } else { site as u32 }, offset));
            offset += u64::from(*out);
            if !case.shared_y || site + 1 == sites {
                let name = (format!("y{}", y.len()), case.act);
                y.push(Operand::new(name, (span(offset + pad, offset), offset + pad, case.shift), &mut grid, || 0.0));
            }
        }
        // Padding inside y is as finite as the guards; -0.0 would hide `+= 0`.
        for y in &mut y {
            let size = case.act.size() as usize;
            let (at, mut bytes) = (y.at as usize, Vec::new());
            for chunk in y.image[at..].chunks_mut(size).take(span(y.stride, y.stride - pad) as usize) {
                bytes.clear();
                case.act.encode(&[grid()], &mut bytes);
                chunk.copy_from_slice(&bytes);
            }
        }
        for (site, (operand, offset)) in places.iter().enumerate() {
            let row_bytes = (u64::from(case.outs[site]) * case.act.size()) as usize;
            for (row, bytes) in data.y[site].chunks(row_bytes).enumerate() {
                let y = &mut y[*operand as usize];
                let range = y.range(row, *offset, case.outs[site].into());
                y.image[range].copy_from_slice(bytes);
            }
        }

        let weights = backend.alloc(u64::from(case.slots) * case.slot_bytes(), "conformance weights")?;
        let (tables, sites) = tables(case, &data, weights.ptr().0, weights.len());
        let mut sites = sites;
        for ((site, tables), (operand, offset)) in sites.iter_mut().enumerate().zip(&places) {
            tables.params.y_operand = *operand;
            tables.params.y_offset = *offset as u32;
            tables.params.y_stride = y[*operand as usize].stride as u32;
            tables.params.z_offset = (site as u64 * part) as u32;
        }
        let (batch, [x_rows_at, tiles_at, packs_at, counts_at]) = batch(case, &data);
        let parts = match backend.caps().z_parts {
            parts if parts > 0 && case.packs => {
                let whole = rows * (u64::from(case.max_rank) + pad) * case.outs.len() as u64 * 4;
                let len = contract::z_bytes(rows, case.outs.len() as u64, case.max_rank, parts).max(whole);
                Some(backend.alloc(len, "conformance z in parts")?)
            }
            _ => None,
        };
        let upload = |bytes: Vec<u8>, label| Ok::<_, crate::Error>((backend.alloc(bytes.len() as u64, label)?, bytes));
        let fixed = [
            upload(batch, "conformance batch")?,
            upload(bytemuck::cast_slice(&tables).to_vec(), "conformance tables")?,
            (weights, self::weights(case, &data)),
        ];

        let operands = || [&x, &z].into_iter().chain(&y);
        let regions = if case.one_allocation {
            let len = operands().map(|o| o.image.len() as u64).sum();
            let all = backend.alloc(len, "conformance x, z and y")?;
            let mut at = 0;
            operands()
                .map(|o| {
                    at += o.image.len() as u64;
                    all.slice(at - o.image.len() as u64, o.image.len() as u64)
                })
                .collect::<Result<Vec<_>>>()?
        } else {
            operands()
                .map(|o| backend.alloc(o.image.len() as u64, &format!("conformance {}", o.name)))
                .collect::<Result<Vec<_>>>()?
        };
        for (operand, region) in [&mut x, &mut z].into_iter().chain(&mut y).zip(regions) {
            operand.all = Some(region);
        }
        let rig = Self {
            backend,
            shrink: backend.load(kernels(case.op)[0], case.spec())?,
            expand: backend.load(kernels(case.op)[1], case.spec())?,
            case: case.clone(),
            data,
            fixed,
            x,
            z,
            y,
            parts,
            tiles_at,
            packs_at,
            x_rows_at,
            counts_at,
            sites,
        };
        backend.submit(&mut |encoder| {
            for (region, bytes) in &rig.fixed {
                encoder.write(region, bytes)?;
            }
            if let Some(parts) = &rig.parts {
                encoder.write(parts, bytemuck::cast_slice(&vec![SCRATCH; parts.len() as usize / 4]))?;
            }
            encoder.write(rig.x.device(), &rig.x.image)
        })?;
        Ok(rig)
    }

    /// Brings z and y back to what they were before the first run.
    ///
    /// # Errors
    /// Those of [`Encoder::write`].
    pub fn reset(&self, encoder: &mut dyn Encoder) -> Result<()> {
        [&self.z].into_iter().chain(&self.y).try_for_each(|o| encoder.write(o.device(), &o.image))
    }

    /// Gives the batch other contents, of the same size: rows, scales and tiles.
    ///
    /// # Errors
    /// Those of the upload.
    pub fn set_batch(&mut self, data: Data) -> Result<()> {
        let (bytes, _) = batch(&self.case, &data);
        let (region, old) = &mut self.fixed[0];
        assert!(bytes.len() <= old.len(), "a batch that was laid out for fewer tiles");
        old.fill(0);
        old[..bytes.len()].copy_from_slice(&bytes);
        self.data = data;
        let (region, bytes) = (&*region, &*old);
        self.backend.submit(&mut |encoder| encoder.write(region, bytes))?;
        Ok(())
    }

    /// Records shrink and expand of all rows and sites, in as many launches as the case says.
    ///
    /// # Errors
    /// Those of [`Launch::new`] and [`Encoder::launch`].
    pub fn record(&self, encoder: &mut dyn Encoder) -> Result<()> {
        let case = &self.case;
        let mut windows = Window::all((case.rows, case.chunk), (case.slots, case.window));
        windows.try_for_each(|window| self.launch(encoder, window))
    }

    fn launch(&self, encoder: &mut dyn Encoder, window: Window) -> Result<()> {
        let case = &self.case;
        let Window { rows: (first, rows), slots } = window;
        let slot_bytes = case.slot_bytes();
        let weights = match &self.fixed[2].0 {
            all if case.all_weights => all.clone(),
            all => all.slice(u64::from(slots.0) * slot_bytes, u64::from(slots.1) * slot_bytes)?,
        };
        let (batch, tables) = (self.fixed[0].0.clone(), self.fixed[1].0.clone());
        let x = match case.gather {
            0 => self.x.rows(first, rows, case.in_features.into())?,
            all => self.x.rows(0, all, case.in_features.into())?,
        };
        let z = match &self.parts {
            Some(parts) => parts.clone(),
            None => self.z.rows(first, rows, self.z.stride - u64::from(case.pad))?,
        };
        let mut params = Params {
            sites: self.sites.len() as u32,
            in_features: case.in_features,
            x_stride: self.x.stride as u32,
            a_stride: case.a_stride(),
            b_stride: case.b_stride(),
            z_stride: self.z.stride as u32,
            max_rank: case.max_rank,
            tiles_at: self.tiles_at,
            tiles: if case.packs { 0 } else { (self.data.tiles.len() + spare_tiles(case).len()) as u32 },
            max_out: case.outs.iter().max().copied().unwrap_or(0),
            x_rows_at: self.x_rows_at,
            x_rows: case.gather,
            packs_at: self.packs_at,
            counts_at: self.counts_at,
            experts: case.counted.into(),
            z_parts: if self.parts.is_some() { self.backend.caps().z_parts } else { 0 },
            ..window.params(case.slots)
        };
        let site = |site: usize, cells: u32, bytes: u64| SiteParams {
            cells,
            span: (bytes / 4) as u32,
            ..self.sites[site].params
        };
        for (i, tables) in self.sites.iter().enumerate() {
            params.site[i] = site(i, tables.a_cells, case.a_bytes());
        }
        let operands = [batch.clone(), tables.clone(), weights.clone(), x, z.clone()];
        encoder.launch(&[Launch::new(&self.shrink, &operands, params)?])?;
        for (i, tables) in self.sites.iter().enumerate() {
            let short = if case.short_span { 16 } else { 0 };
            params.site[i] = site(i, tables.b_cells, case.b_bytes(i) + 2 * case.vector_bytes(i) - short);
        }
        let mut operands = vec![batch, tables, weights, z];
        for y in &self.y {
            operands.push(y.rows(first, rows, y.stride - u64::from(case.pad))?);
        }
        encoder.launch(&[Launch::new(&self.expand, &operands, params)?])
    }

    /// Runs once, from the state before any run.
    ///
    /// # Errors
    /// Those of the device.
    pub fn run(&self) -> Result<Outputs> {
        self.backend.submit(&mut |encoder| {
            self.reset(encoder)?;
            self.record(encoder)
        })?;
        self.outputs()
    }

    /// What z and y hold now.
    ///
    /// # Errors
    /// Those of the device.
    pub fn outputs(&self) -> Result<Outputs> {
        let z = self.backend.read(self.z.device())?;
        let y = self.y.iter().map(|y| self.backend.read(y.device())).collect::<Result<_>>()?;
        Ok(Outputs { z, y })
    }

    /// Compares every element with the oracle, and every byte that a run must not touch with what it was.
    ///
    /// # Errors
    /// Those of reading back what the device must only read.
    pub fn check(&self, outputs: &Outputs) -> Result<Check> {
        let (case, data) = (&self.case, &self.data);
        let mut check = Check::default();
        let [z_unit, y_unit, shaped_unit] = match case.values {
            Values::Grid => [Z_UNIT, Y_UNIT, SHAPED_UNIT].map(Some),
            _ => [None; 3],
        };
        let (mut kept_z, mut kept_y) = (self.z.image.clone(), Vec::new());
        kept_y.extend(self.y.iter().map(|y| y.image.clone()));
        for (site, tables) in self.sites.iter().enumerate() {
            let (operand, out) = (tables.params.y_operand as usize, u64::from(case.outs[site]));
            let y = &self.y[operand];
            let (z_name, y_name) = (format!("z of site {site}"), format!("y of site {site}"));
            for row in 0..case.rows as usize {
                let Some(pair) = data.pair(row, site) else {
                    check.elements += out;
                    continue;
                };
                let oracle = Oracle::new(data.view(case, site, pair), data.x(case, row));
                if self.parts.is_none() {
                    let range = self.z.range(row, tables.params.z_offset.into(), pair.rank.into());
                    let got = DType::F32.decode(&outputs.z[range.clone()]);
                    check.row(&z_name, row, DType::F32, &oracle.shrink(z_unit), &got);
                    kept_z[range.clone()].copy_from_slice(&outputs.z[range]);
                }

                if case.short_span && pair.vectors.is_some() {
                    check.elements += out;
                    continue;
                }
                let range = y.range(row, tables.params.y_offset.into(), out);
                let before = case.act.decode(&y.image[range.clone()]);
                let scales = [pair.scale, data.row_scales[row]].map(f64::from);
                let unit = if pair.vectors.is_some() { shaped_unit } else { y_unit };
                let expected = oracle.expand_shaped(&before, scales, pair.vectors(), case.act, unit);
                check.row(&y_name, row, case.act, &expected, &case.act.decode(&outputs.y[operand][range.clone()]));
                kept_y[operand][range.clone()].copy_from_slice(&outputs.y[operand][range]);
            }
        }
        self.z.check_kept(&kept_z, &outputs.z, &mut check);
        for ((y, kept), got) in self.y.iter().zip(&kept_y).zip(&outputs.y) {
            y.check_kept(kept, got, &mut check);
        }
        let fixed = ["batch", "tables", "weights"].into_iter().zip(self.fixed.iter().map(|(r, b)| (r, b)));
        for (name, (region, bytes)) in fixed.chain([("x", (self.x.device(), &self.x.image))]) {
            if region.len() <= SMALL && self.backend.read(region)? != *bytes {
                let site = format!("{name}, which is only read");
                check.mismatch(Mismatch { site, row: 0, column: 0, got: f32::NAN, want: f64::NAN, bound: 0.0 });
            }
        }
        Ok(check)
    }

    /// The bytes of `row` at `site`: its z up to its rank, and its y.
    pub fn row<'o>(&self, outputs: &'o Outputs, row: usize, site: usize) -> (&'o [u8], &'o [u8]) {
        let params = &self.sites[site].params;
        // In parts it is where the device likes.
        let rank = if self.parts.is_some() { 0 } else { self.data.pair(row, site).map_or(0, |pair| pair.rank) };
        let z = self.z.range(row, params.z_offset.into(), rank.into());
        let operand = params.y_operand as usize;
        let y = self.y[operand].range(row, params.y_offset.into(), self.case.outs[site].into());
        (&outputs.z[z], &outputs.y[operand][y])
    }
}

/// Tiles behind those in use.
fn spare_tiles(case: &Case) -> Vec<Tile> {
    vec![Tile { slot: -1, ..Tile::default() }; if case.counted { 300 } else { 0 }]
}

/// The batch operand, and the words where rows of x are named (0: nowhere), where its tiles start, where its packs
/// do, which a case has in place of tiles (0: nowhere), and where the number of tiles in use is (0: nowhere).
fn batch(case: &Case, data: &Data) -> (Vec<u8>, [u32; 4]) {
    let rows = data.slots.iter().zip(&data.row_scales).map(|(slot, scale)| RowRef { slot: *slot, scale: *scale });
    let mut bytes: Vec<u8> = bytemuck::cast_slice(&rows.collect::<Vec<_>>()).to_vec();
    let x_rows_at = if data.x_rows.is_empty() { 0 } else { bytes.len() as u32 / 4 };
    bytes.extend_from_slice(bytemuck::cast_slice(&data.x_rows));
    bytes.resize(bytes.len().next_multiple_of(16), 0xff);
    let mut counts_at = 0;
    if case.counted {
        counts_at = bytes.len() as u32 / 4;
        bytes
            .extend([data.tiles.len() as u32, u32::MAX, u32::MAX, u32::MAX].iter().flat_map(|word| word.to_ne_bytes()));
    }
    let at = bytes.len() as u32 / 4;
    if !case.packs {
        bytes.extend_from_slice(bytemuck::cast_slice(&data.tiles));
        bytes.extend_from_slice(bytemuck::cast_slice(&spare_tiles(case)));
        return (bytes, [x_rows_at, at, 0, counts_at]);
    }
    // Where another batch has its packs too, however many tiles it would have.
    let plan = Plan::from_slots(data.slots.iter().copied());
    let spare = Pack { slot: -1, ..Pack::default() };
    let packs = plan.packs().iter().copied().chain(std::iter::repeat(spare)).take(data.slots.len());
    bytes.extend_from_slice(bytemuck::cast_slice(&packs.collect::<Vec<_>>()));
    (bytes, [x_rows_at, 0, at, 0])
}

/// The weights operand: slot after slot, A, B and vectors of each site; NaN wherever no pair has an element.
fn weights(case: &Case, data: &Data) -> Vec<u8> {
    let (mut nan, size) = (Vec::new(), case.weight.size() as usize);
    case.weight.encode(&[f32::NAN], &mut nan);
    let mut bytes = nan.repeat((u64::from(case.slots) * case.slot_bytes()) as usize / size);
    let mut row = Vec::new();
    let mut matrix = |bytes: &mut [u8], values: Option<&[f32]>, width: u32, stride: u32| {
        for (i, values) in values.unwrap_or_default().chunks(width.max(1) as usize).enumerate() {
            row.clear();
            case.weight.encode(values, &mut row);
            bytes[i * stride as usize * size..][..row.len()].copy_from_slice(&row);
        }
    };
    let mut rest = &mut bytes[..];
    for slot in &data.pairs {
        for (site, pair) in slot.iter().enumerate() {
            let pair = pair.as_ref().ok();
            let mut part = |len: u64| rest.split_off_mut(..len as usize).unwrap_or_default();
            matrix(part(case.a_bytes()), pair.map(|p| &p.a[..]), case.in_features, case.a_stride());
            matrix(part(case.b_bytes(site)), pair.map(|p| &p.b[..]), pair.map_or(1, |p| p.rank), case.b_stride());
            let vectors = pair.and_then(|p| p.vectors());
            for values in [0, 1].map(|i| vectors.map_or(&[][..], |v| v[i])) {
                let vector = part(case.vector_bytes(site));
                vector.chunks_mut(4).for_each(|e| e.copy_from_slice(&f32::NAN.to_le_bytes()));
                vector[..4 * values.len()].copy_from_slice(bytemuck::cast_slice(values));
            }
        }
    }
    bytes
}

/// The tables operand, and each site's arrays in it. What lies between arrays is no table's business.
fn tables(case: &Case, data: &Data, weights: u64, weights_len: u64) -> (Vec<u32>, Vec<Tables>) {
    let mut words = Vec::new();
    let slots = case.slots as usize;
    let array = |words: &mut Vec<u32>, len: usize| {
        words.resize(words.len().next_multiple_of(4) + case.table_shift as usize, u32::MAX);
        let at = words.len();
        words.resize(at + len, 0);
        at
    };
    let mut sites: Vec<Tables> = Vec::new();
    let mut offset = 0;
    for site in 0..case.outs.len() {
        let a_bytes = case.a_bytes();
        let b_bytes = case.b_bytes(site) + 2 * case.vector_bytes(site);
        let [a, b] = [array(&mut words, 2 * slots), array(&mut words, 2 * slots)];
        let [ranks, scales] = [array(&mut words, slots), array(&mut words, slots)];
        for slot in 0..slots {
            let address = weights + slot as u64 * case.slot_bytes() + offset;
            let (mut cells, mut rank, mut scale) = ([address, address + a_bytes], 1, 1.0);
            match &data.pairs[slot][site] {
                Ok(pair) => {
                    (rank, scale) = (pair.rank | if pair.vectors.is_some() { RANK_VECTORS } else { 0 }, pair.scale)
                }
                Err(Absent::Vacant) => (cells, rank, scale) = ([0, 0], 0, 0.0),
                Err(Absent::NoCell) => cells = [0, 0],
                Err(Absent::NoRank) => rank = if case.vectors { RANK_VECTORS } else { 0 },
                Err(Absent::Below) => cells = [weights - 16; 2],
                Err(Absent::Over) => cells = [a_bytes, b_bytes].map(|bytes| weights + weights_len - bytes + 16),
                Err(Absent::Beyond) => cells = [weights + weights_len; 2],
                Err(Absent::Last) => cells = [u64::MAX - 15; 2],
                Err(Absent::High) => cells = cells.map(|cell| cell ^ (1 << 32)),
                Err(Absent::RankAbove) => rank = case.max_rank + 1 + if case.vectors { RANK_VECTORS } else { 0 },
                Err(Absent::RankLast) => rank = u32::MAX,
            }
            for (at, cell) in [a, b].into_iter().zip(cells) {
                words[at + 2 * slot] = cell as u32;
                words[at + 2 * slot + 1] = (cell >> 32) as u32;
            }
            words[ranks + slot] = rank;
            words[scales + slot] = scale.to_bits();
        }
        offset += a_bytes + b_bytes;
        let out_features = case.outs[site];
        let params = SiteParams { ranks: ranks as u32, scales: scales as u32, out_features, ..SiteParams::default() };
        sites.push(Tables { a_cells: a as u32, b_cells: b as u32, params });
    }
    assert!(sites.len() <= MAX_SITES);
    (words, sites)
}
