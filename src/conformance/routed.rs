//! Batches of routed layers: each row's slot, row of x and tile, word by word.

use std::fmt;

use super::data::Dice;
use super::oracle::{Check, Mismatch};
use super::{Outcome, Trial};
use crate::backend::{Encoder, GpuBackend, Launch, Pipeline};
use crate::contract::{Kernel, Params, ROUTED_OFFSETS, ROUTED_TOKENS, RowRef, SGMV_TILE_ROWS, Spec, THREADS};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Region;

/// What memory holds where nothing was written.
const POISON: u32 = 0xdead_beef;
/// Words of guard around what is written.
const GUARD: u32 = 64;

/// One launch of expert_rows, and one of expert_tiles behind it.
#[derive(Clone, Copy, Debug)]
struct Case {
    tokens: u32,
    top_k: u32,
    experts: u32,
    /// Entries from one slot to the next.
    stride: u32,
    slots: u32,
    /// Rows that aren't of any token, behind the tokens'.
    spare: u32,
    routed: u32,
    tiles: bool,
    x_rows: bool,
    /// Whether every row has the same slot.
    one_slot: bool,
    /// Words by which operands start off a multiple of 256 bytes.
    shift: u32,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            tokens: 33,
            top_k: 2,
            experts: 8,
            stride: 24,
            slots: 3,
            spare: 0,
            routed: 0,
            tiles: true,
            x_rows: true,
            one_slot: false,
            shift: 0,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, top_k, experts, stride, slots, spare, shift, .. } = self;
        let way = ["in order", "by tokens", "in order by offsets", "sorted"][self.routed as usize];
        write!(f, "{way},tokens={tokens},top_k={top_k},experts={experts},stride={stride},slots={slots}")?;
        write!(f, ",spare={spare},shift={shift}{}", if self.tiles { "" } else { ",no tiles" })?;
        f.write_str(if self.x_rows { "" } else { ",no x rows" })?;
        f.write_str(if self.one_slot { ",one slot" } else { "" })
    }
}

/// What a launch reads.
#[derive(Clone, Debug)]
struct Routing {
    batch: Vec<RowRef>,
    /// The expert of each row, if it has one.
    expert: Vec<u32>,
    offsets: Vec<u32>,
    tokens: Vec<u32>,
}

impl Case {
    fn rows(&self) -> u32 {
        self.tokens * self.top_k + self.spare
    }

    /// Any routing: rows without an expert, tokens that aren't there, slots that aren't.
    fn routing(&self, seed: u64) -> Routing {
        let mut dice = Dice::new(seed);
        let slot = |dice: &mut Dice| match dice.below(self.slots + 2) {
            _ if self.one_slot => 0,
            slot if slot < self.slots => slot as i32,
            _ => [-1, i32::MIN, self.slots as i32, i32::MAX][dice.below(4) as usize],
        };
        let batch = (0..self.tokens).map(|_| RowRef { slot: slot(&mut dice), scale: dice.unit() }).collect();
        // Few experts at a time, so that neighbours share them.
        let busy: Vec<u32> = (0..3).map(|_| dice.below(self.experts)).collect();
        let expert = |dice: &mut Dice| match dice.below(8) {
            _ if self.one_slot => 0,
            0 => [self.experts, self.experts + 1, i32::MAX as u32, u32::MAX][dice.below(4) as usize],
            1 => dice.below(self.experts),
            n => busy[n as usize % busy.len()],
        };
        let mut expert: Vec<u32> = (0..self.rows()).map(|_| expert(&mut dice)).collect();
        let mut ends: Vec<u32> = (0..=self.experts).map(|_| dice.below(self.rows() + 2)).collect();
        ends.sort_unstable();
        if self.routed & ROUTED_OFFSETS != 0 {
            let of = |row: u32| ends.windows(2).position(|pair| (pair[0]..pair[1]).contains(&row));
            expert = (0..self.rows()).map(|row| of(row).map_or(u32::MAX, |expert| expert as u32)).collect();
        }
        let places = self.tokens * self.top_k;
        let tokens = (0..self.rows()).map(|_| match dice.below(places + 2) {
            place if place < places => place,
            _ => [places, u32::MAX][dice.below(2) as usize],
        });
        let tokens = tokens.collect();
        Routing { batch, expert, offsets: ends, tokens }
    }

    /// Words where tiles, counts and rows of x are, and words in all.
    fn places(&self) -> [u32; 4] {
        let rows = self.rows();
        let (tiles, counts) = if self.tiles { (4 * rows, 1 + rows.div_ceil(THREADS)) } else { (0, 0) };
        let [tiles_at, counts_at, x_rows_at] = [2 * rows, 2 * rows + tiles, 2 * rows + tiles + counts];
        [tiles_at, counts_at, x_rows_at, x_rows_at + if self.x_rows { rows } else { 0 }]
    }

    /// What must be written: row by row, tile by tile.
    fn expected(&self, routing: &Routing) -> Vec<u32> {
        let rows: Vec<(i32, f32, u32)> = (0..self.rows())
            .map(|row| {
                let place = if self.routed & ROUTED_TOKENS != 0 { routing.tokens[row as usize] } else { row };
                let token = place / self.top_k;
                let Some(of_token) = routing.batch.get(token as usize) else { return (-1, 0.0, u32::MAX) };
                let expert = routing.expert[row as usize];
                if expert >= self.experts || of_token.slot < 0 || of_token.slot >= self.slots as i32 {
                    return (-1, 0.0, u32::MAX);
                }
                (of_token.slot * self.stride as i32 + expert as i32, of_token.scale, token)
            })
            .collect();
        let mut words: Vec<u32> = rows.iter().flat_map(|(slot, scale, _)| [*slot as u32, scale.to_bits()]).collect();
        if self.tiles {
            let mut tiles = Vec::new();
            let mut counts = vec![0; rows.len().div_ceil(THREADS as usize)];
            let mut first = 0;
            for group in rows.chunks(THREADS as usize) {
                let runs = group.chunk_by(|a, b| a.0 == b.0);
                for run in runs.flat_map(|run| run.chunks(SGMV_TILE_ROWS as usize)) {
                    if run[0].0 >= 0 {
                        tiles.push([run[0].0 as u32, first as u32, run.len() as u32, 0]);
                        counts[first / THREADS as usize] += 1;
                    }
                    first += run.len();
                }
            }
            let used = tiles.len() as u32;
            tiles.resize(rows.len(), [u32::MAX, 0, 0, 0]);
            words.extend(tiles.as_flattened());
            words.push(used);
            words.extend(counts);
        }
        if self.x_rows {
            words.extend(rows.iter().map(|(.., token)| token));
        }
        words
    }
}

/// A case's memory on a device.
struct Rig {
    case: Case,
    rows: Pipeline,
    tiles: Pipeline,
    /// Batch, experts, rows, tokens: the whole of each.
    memory: [Region; 4],
}

impl Rig {
    fn new(backend: &dyn GpuBackend, case: Case) -> Result<Self> {
        let words = [2 * case.tokens, case.rows().max(case.experts + 1), case.places()[3] + 2 * GUARD, case.rows()];
        let alloc = |words: u32| backend.alloc(u64::from(words + case.shift + 64) * 4, "conformance routing");
        let spec = Spec { act: DType::F32, weight: DType::F32 };
        let memory = [alloc(words[0])?, alloc(words[1])?, alloc(words[2])?, alloc(words[3])?];
        let [rows, tiles] = [Kernel::ExpertRows, Kernel::ExpertTiles].map(|kernel| backend.load(kernel, spec));
        Ok(Self { case, rows: rows?, tiles: tiles?, memory })
    }

    /// Records the upload of `routing`, and poisons what is to be written.
    fn upload(&self, encoder: &mut dyn Encoder, routing: &Routing) -> Result<()> {
        let [batch, experts, rows, tokens] = &self.memory;
        let at = u64::from(self.case.shift) * 4;
        let mut write = |region: &Region, bytes: &[u8]| encoder.write(&region.slice(at, region.len() - at)?, bytes);
        write(batch, bytemuck::cast_slice(&routing.batch))?;
        let by_offsets = self.case.routed & ROUTED_OFFSETS != 0;
        write(experts, bytemuck::cast_slice(if by_offsets { &routing.offsets } else { &routing.expert }))?;
        write(tokens, bytemuck::cast_slice(&routing.tokens))?;
        encoder.write(rows, bytemuck::cast_slice(&vec![POISON; rows.len() as usize / 4]))
    }

    fn launch(&self, encoder: &mut dyn Encoder) -> Result<()> {
        let case = &self.case;
        let [_, counts_at, x_rows_at, words] = case.places();
        let params = Params {
            rows: case.rows(),
            slots: case.slots,
            experts: case.experts,
            top_k: case.top_k,
            slot_stride: case.stride,
            routed: case.routed,
            x_rows: case.tokens,
            x_rows_at: if case.x_rows { x_rows_at } else { 0 },
            counts_at: if case.tiles { counts_at } else { 0 },
            ..Params::default()
        };
        let part = |region: &Region, first: u32, words: u32| {
            region.slice(u64::from(case.shift + first) * 4, u64::from(words) * 4)
        };
        let [batch, experts, rows, tokens] = &self.memory;
        let routes = if case.routed & ROUTED_OFFSETS != 0 { case.experts + 1 } else { case.rows() };
        let mut operands = vec![part(batch, 0, 2 * case.tokens)?, part(experts, 0, routes)?, part(rows, GUARD, words)?];
        if case.routed & ROUTED_TOKENS != 0 {
            operands.push(part(tokens, 0, case.rows())?);
        }
        encoder.launch(&[Launch::new(&self.rows, &operands, params)?])?;
        if case.tiles {
            self.launch_tiles(encoder)?;
        }
        Ok(())
    }

    fn launch_tiles(&self, encoder: &mut dyn Encoder) -> Result<()> {
        let [tiles_at, counts_at, _, words] = self.case.places();
        let rows = self.memory[2].slice(u64::from(self.case.shift + GUARD) * 4, u64::from(words) * 4)?;
        let params =
            Params { rows: self.case.rows(), tiles_at, tiles: self.case.rows(), counts_at, ..Params::default() };
        encoder.launch(&[Launch::new(&self.tiles, &[rows], params)?])
    }

    fn check(&self, backend: &dyn GpuBackend, routing: &Routing, check: &mut Check) -> Result<()> {
        let got = backend.read(&self.memory[2])?;
        let got: &[u32] = bytemuck::cast_slice(&got);
        let mut want = vec![POISON; got.len()];
        let first = (self.case.shift + GUARD) as usize;
        let expected = self.case.expected(routing);
        want[first..first + expected.len()].copy_from_slice(&expected);
        check.elements += expected.len() as u64;
        for (i, (want, got)) in want.iter().zip(got).enumerate().filter(|(_, (want, got))| want != got) {
            let site = format!("word {} of the rows: {got:#x}, want {want:#x}", i as i64 - first as i64);
            let (got, want) = (*got as f32, f64::from(*want));
            check.mismatch(Mismatch { site, row: i, column: 0, got, want, bound: 0.0 });
        }
        Ok(())
    }
}

/// One launch, and then others of the same graph with another routing each.
fn run(backend: &dyn GpuBackend, case: Case) -> Result<Outcome> {
    let rig = Rig::new(backend, case)?;
    let mut check = Check::default();
    let routing = case.routing(1);
    backend.submit(&mut |encoder| {
        rig.upload(encoder, &routing)?;
        rig.launch(encoder)
    })?;
    rig.check(backend, &routing, &mut check)?;
    let graph = backend.capture(&mut |encoder| rig.launch(encoder))?;
    for seed in 2..5 {
        let routing = case.routing(seed);
        backend.submit(&mut |encoder| rig.upload(encoder, &routing))?;
        graph.replay()?;
        rig.check(backend, &routing, &mut check)?;
    }
    Ok(Outcome::Checked(check))
}

/// Tiles by counts of more than there can be: whatever they become, all else keeps its bits.
fn hostile(backend: &dyn GpuBackend) -> Result<Outcome> {
    let case = Case { tokens: 301, one_slot: true, ..Case::default() };
    let rig = Rig::new(backend, case)?;
    let routing = case.routing(1);
    let [tiles_at, counts_at, x_rows_at, _] = case.places();
    let first = case.shift + GUARD;
    let counts = vec![case.rows(); (x_rows_at - counts_at) as usize];
    let part = rig.memory[2].slice(u64::from(first + counts_at) * 4, counts.len() as u64 * 4)?;
    backend.submit(&mut |encoder| {
        rig.upload(encoder, &routing)?;
        rig.launch(encoder)?;
        encoder.write(&part, bytemuck::cast_slice(&counts))
    })?;
    let before = backend.read(&rig.memory[2])?;
    backend.submit(&mut |encoder| rig.launch_tiles(encoder))?;
    let after = backend.read(&rig.memory[2])?;
    let [before, after]: [&[u32]; 2] = [bytemuck::cast_slice(&before), bytemuck::cast_slice(&after)];
    let own = (first + tiles_at) as usize..=(first + counts_at) as usize;
    let mut check = Check { elements: before.len() as u64, ..Check::default() };
    for (i, (want, got)) in
        before.iter().zip(after).enumerate().filter(|(i, (want, got))| want != got && !own.contains(i))
    {
        let site = format!("word {i} of the rows: {got:#x}, want {want:#x}");
        check.mismatch(Mismatch { site, row: i, column: 0, got: *got as f32, want: f64::from(*want), bound: 0.0 });
    }
    Ok(Outcome::Checked(check))
}

/// All trials of routed batches.
pub fn trials() -> Vec<Trial> {
    let mut cases = Vec::new();
    for routed in 0..4 {
        let base = Case { routed, ..Case::default() };
        cases.extend([1, 2, 7, 8, 63, 64, 65, 200].map(|tokens| Case { tokens, ..base }));
        cases.extend([1, 3, 8].map(|top_k| Case { top_k, ..base }));
        cases.extend([1, 2, 128, 1000].map(|experts| Case { experts, stride: experts, ..base }));
        cases.push(Case { spare: 21, ..base });
        cases.push(Case { tiles: false, ..base });
        cases.push(Case { x_rows: false, ..base });
        cases.push(Case { tiles: false, x_rows: false, shift: 3, ..base });
        cases.push(Case { shift: 5, ..base });
        cases.push(Case { tokens: 301, one_slot: true, ..base });
        cases.push(Case { slots: 1 << 16, stride: 1 << 14, ..base });
        cases.push(Case { tokens: 35_000, ..base });
    }
    // More workgroups than 65,535 in one dimension.
    cases.push(Case { tokens: 1_050_000, top_k: 8, tiles: false, x_rows: false, ..Case::default() });
    let trial = |case: Case| Trial::new(format!("expert_rows[{case}]"), move |backend| run(backend, case));
    cases.into_iter().map(trial).chain([Trial::new("expert_tiles[hostile counts]", hostile)]).collect()
}
