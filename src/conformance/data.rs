//! A case's contents in host memory: batch, pairs, x and y, made from the case alone.

use rand_xoshiro::Xoshiro256PlusPlus;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

use super::case::{Case, Mix, Ranks, Values};
use super::oracle::Pair;
use crate::contract::SGMV_TILE_ROWS;
use crate::contract::Tile;
use crate::dtype::DType;
use crate::ops::Op;

/// The same numbers on every platform.
#[derive(Clone, Debug)]
pub struct Dice(Xoshiro256PlusPlus);

impl Dice {
    /// A stream of its own for each `seed`.
    pub fn new(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// `0..n`
    pub fn below(&mut self, n: u32) -> u32 {
        ((u64::from(self.0.next_u32()) * u64::from(n)) >> 32) as u32
    }

    /// `-1..1`, every mantissa.
    pub fn unit(&mut self) -> f32 {
        (self.0.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    /// `-n..=n`
    fn whole(&mut self, n: u32) -> f32 {
        self.below(2 * n + 1) as f32 - n as f32
    }
}

/// A pair in host memory, of exactly its rank.
#[derive(Clone, Debug)]
pub struct HostPair {
    /// `A[rank][in_features]`
    pub a: Vec<f32>,
    /// `B[out_features][rank]`
    pub b: Vec<f32>,
    /// Its true rank.
    pub rank: u32,
    /// The site's scale in this slot.
    pub scale: f32,
    /// `gain[out_features]` and `offset[out_features]`
    pub vectors: Option<[Vec<f32>; 2]>,
}

impl HostPair {
    /// Its vectors as the oracle takes them.
    pub fn vectors(&self) -> Option<[&[f32]; 2]> {
        self.vectors.as_ref().map(|[gain, offset]| [&gain[..], &offset[..]])
    }
}

/// How a table says that a slot has no pair at a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Absent {
    /// No address and no rank.
    Vacant,
    /// No address; rank and scale of an earlier adapter are still there.
    NoCell,
    /// Addresses of an earlier adapter are still there.
    NoRank,
    /// Addresses just below the weights.
    Below,
    /// Addresses in the weights, of matrices that run over their end.
    Over,
    /// Addresses past the weights.
    Beyond,
    /// The largest multiple of 16.
    Last,
    /// The right low word under a high word that is off by one.
    High,
    /// A rank of max_rank + 1.
    RankAbove,
    /// A rank of 2^32 - 1.
    RankLast,
}

impl Absent {
    /// Those that no pool would write.
    const HOSTILE: [Absent; 7] =
        [Absent::Below, Absent::Over, Absent::Beyond, Absent::Last, Absent::High, Absent::RankAbove, Absent::RankLast];
}

/// All of a case's contents.
#[derive(Clone, Debug)]
pub struct Data {
    /// Slot of each row.
    pub slots: Vec<i32>,
    /// Multiplier of each row.
    pub row_scales: Vec<f32>,
    /// Tiles of the batch, empty ones among them.
    pub tiles: Vec<Tile>,
    /// `[slot][site]`
    pub pairs: Vec<Vec<Result<HostPair, Absent>>>,
    /// `x[x_rows][in_features]`, each value one of the activation type, and behind them a row of zeros.
    pub x: Vec<f32>,
    /// The row of x that each row names, where rows name them.
    pub x_rows: Vec<u32>,
    /// For each site `y[rows][out_features]` before the launch. Rows that must keep their bits hold any
    /// bits; they're encoded as they are here.
    pub y: Vec<Vec<u8>>,
}

impl Data {
    /// The contents of `case`: the same for the same case.
    pub fn new(case: &Case) -> Self {
        let mut dice = Dice::new(0x1029);
        let mut slots = batch(case, &mut dice);
        if case.op == Op::Sgmv && case.mix != Mix::Distinct {
            slots.sort_unstable();
        }
        let row_scales = slots.iter().map(|_| if case.row_scales { row_scale(case, &mut dice) } else { 1.0 }).collect();
        let mut tiles = tiles(&slots);
        if case.hostile {
            tiles.extend(hostile_tiles(case));
        }
        let pairs: Vec<Vec<_>> = (0..case.slots)
            .map(|slot| (0..case.outs.len() as u32).map(|site| pair(case, slot, site, &mut dice)).collect())
            .collect();
        let mut x: Vec<f32> = (0..u64::from(case.x_rows()) * u64::from(case.in_features))
            .map(|_| case.act.round(element(case.values, Part::X, case, &mut dice)))
            .collect();
        if case.values == Values::NonFinite {
            let row = case.x_rows() as usize / 2;
            for (k, x) in x[row * case.in_features as usize..][..case.in_features as usize].iter_mut().enumerate() {
                *x = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0][k % 4];
            }
        }
        x.resize(x.len() + case.in_features as usize, 0.0);
        let beyond = [case.gather, case.gather + 1, i32::MAX as u32, u32::MAX];
        let x_rows = (0..if case.gather == 0 { 0 } else { case.rows }).map(|_| match dice.below(case.gather + 1) {
            row if row < case.gather => row,
            _ => beyond[dice.below(4) as usize],
        });
        let x_rows = x_rows.collect();
        let mut data = Self { slots, row_scales, tiles, pairs, x, x_rows, y: Vec::new() };
        for (site, out) in case.outs.iter().enumerate() {
            let mut y = Vec::new();
            for row in 0..case.rows as usize {
                if data.pair(row, site).is_some() {
                    let values: Vec<f32> = (0..*out).map(|_| element(case.values, Part::Y, case, &mut dice)).collect();
                    case.act.encode(&values, &mut y);
                } else {
                    y.extend((0..u64::from(*out) * case.act.size()).map(|_| dice.bits() as u8));
                }
            }
            data.y.push(y);
        }
        data
    }

    /// The pair that `row` has at `site`, if its row of y is to change there.
    pub fn pair(&self, row: usize, site: usize) -> Option<&HostPair> {
        let slot = usize::try_from(self.slots[row]).ok()?;
        self.pairs.get(slot)?[site].as_ref().ok()
    }

    /// These rows, in this order, as a batch of their own.
    pub fn select(&self, case: &Case, rows: &[usize]) -> Self {
        let zeros = vec![0.0; case.in_features as usize];
        let x = match case.gather {
            0 => rows.iter().map(|row| self.x(case, *row)).chain([&zeros[..]]).collect::<Vec<_>>().concat(),
            _ => self.x.clone(),
        };
        let of_site = |(y, out): (&Vec<u8>, &u32)| {
            let width = (u64::from(*out) * case.act.size()) as usize;
            rows.iter().flat_map(|row| y[row * width..(row + 1) * width].iter().copied()).collect()
        };
        let selected = Self {
            slots: rows.iter().map(|row| self.slots[*row]).collect(),
            row_scales: rows.iter().map(|row| self.row_scales[*row]).collect(),
            x,
            x_rows: rows.iter().filter_map(|row| self.x_rows.get(*row).copied()).collect(),
            y: self.y.iter().zip(&case.outs).map(of_site).collect(),
            ..self.clone()
        };
        selected.tiled()
    }

    /// With the tiles that its slots make.
    pub fn tiled(self) -> Self {
        Self { tiles: tiles(&self.slots), ..self }
    }

    /// The oracle's view of a pair.
    pub fn view<'a>(&self, case: &Case, site: usize, pair: &'a HostPair) -> Pair<'a> {
        Pair {
            a: &pair.a,
            b: &pair.b,
            rank: pair.rank as usize,
            in_features: case.in_features as usize,
            out_features: case.outs[site] as usize,
        }
    }

    /// x of a row, as it reads it.
    pub fn x(&self, case: &Case, row: usize) -> &[f32] {
        let row = match self.x_rows.get(row) {
            Some(named) => (*named).min(case.gather) as usize,
            None => row,
        };
        self.x_row(case, row)
    }

    /// A row of x.
    pub fn x_row(&self, case: &Case, row: usize) -> &[f32] {
        let width = case.in_features as usize;
        &self.x[row * width..(row + 1) * width]
    }
}

/// Slots of the rows.
fn batch(case: &Case, dice: &mut Dice) -> Vec<i32> {
    let none = |dice: &mut Dice| [-1, -1, -2, i32::MIN][dice.below(4) as usize];
    let weight = |slot: u32| 1.0 / f64::from(slot + 1);
    let total: f64 = (0..case.slots).map(weight).sum();
    let slot = |row: u32, dice: &mut Dice| match &case.mix {
        Mix::Distinct => (row % case.slots) as i32,
        Mix::Base => none(dice),
        Mix::These(slots) => slots[row as usize % slots.len()],
        Mix::Uniform => match dice.below(case.slots + 1) {
            slot if slot < case.slots => slot as i32,
            _ => none(dice),
        },
        Mix::Zipf if dice.below(8) == 0 => none(dice),
        Mix::Zipf => {
            let mut at = f64::from(dice.unit().abs()) * total;
            (0..case.slots - 1)
                .find(|slot| {
                    at -= weight(*slot);
                    at < 0.0
                })
                .unwrap_or(case.slots - 1) as i32
        }
    };
    (0..case.rows).map(|row| slot(row, dice)).collect()
}

/// Runs of one slot, in tiles; after each run an unused tile, rows without an adapter in tiles or in none.
fn tiles(slots: &[i32]) -> Vec<Tile> {
    let mut tiles = Vec::new();
    let mut first = 0;
    for run in slots.chunk_by(|a, b| a == b) {
        if run[0] != -2 {
            for (i, rows) in run.chunks(SGMV_TILE_ROWS as usize).enumerate() {
                let first_row = (first + i * SGMV_TILE_ROWS as usize) as u32;
                tiles.push(Tile { slot: run[0], first_row, rows: rows.len() as u32, reserved: 0 });
            }
        }
        if run.len() > 1 {
            tiles.push(Tile { slot: run[0], first_row: first as u32, rows: 0, reserved: 0 });
        }
        first += run.len();
    }
    tiles
}

/// Tiles of rows and slots that don't exist. 2^32 - 1 + 1 = 0 would be row 0 once more.
fn hostile_tiles(case: &Case) -> Vec<Tile> {
    let tile = |slot, first_row, rows| Tile { slot, first_row, rows, reserved: 0 };
    vec![
        tile(0, case.rows, SGMV_TILE_ROWS),
        tile(0, u32::MAX, SGMV_TILE_ROWS),
        tile(0, u32::MAX - 3, u32::MAX),
        tile(0, case.rows + 5, u32::MAX),
        tile(case.slots as i32, 0, SGMV_TILE_ROWS),
        tile(i32::MAX, 0, SGMV_TILE_ROWS),
        tile(-7, 0, SGMV_TILE_ROWS),
        tile(i32::MIN, 0, SGMV_TILE_ROWS),
    ]
}

/// A pair, or in what way it's missing.
fn pair(case: &Case, slot: u32, site: u32, dice: &mut Dice) -> Result<HostPair, Absent> {
    let kind = slot * case.outs.len() as u32 + site;
    if case.nulls && kind % 3 == 1 {
        return Err([Absent::Vacant, Absent::NoCell, Absent::NoRank][(kind / 3 % 3) as usize]);
    }
    if case.hostile && slot % 2 == 1 {
        return Err(Absent::HOSTILE[slot as usize / 2 % Absent::HOSTILE.len()]);
    }
    let rank = match case.ranks {
        Ranks::All(rank) => rank,
        Ranks::Mixed => 1 + dice.below(case.max_rank),
    };
    let mut values = |n: u32, part: Part| -> Vec<f32> {
        (0..n).map(|_| case.weight.round(element(case.values, part, case, dice))).collect()
    };
    let a = values(rank * case.in_features, Part::A);
    let b = values(case.outs[site as usize] * rank, Part::B);
    let scale = match case.values {
        Values::Grid => [2.0, 0.5, -1.0, 1.0][(kind % 4) as usize],
        _ => [2.0, 0.3, -1.0, 4.0 / 3.0][(kind % 4) as usize],
    };
    let vectors = (case.vectors && kind % 3 != 2).then(|| {
        let out = case.outs[site as usize];
        let mut vector = |part: Part| (0..out).map(|_| element(case.values, part, case, dice)).collect();
        [vector(Part::Gain), vector(Part::Offset)]
    });
    Ok(HostPair { a, b, rank, scale, vectors })
}

fn row_scale(case: &Case, dice: &mut Dice) -> f32 {
    match case.values {
        Values::Grid => [1.0, 0.0, -1.0, 0.5, -2.0][dice.below(5) as usize],
        _ => [1.0, 0.0, -0.7, 0.1, 3.0][dice.below(5) as usize],
    }
}

/// Which operand an element is of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    A,
    B,
    X,
    Y,
    Gain,
    Offset,
}

/// Values::Grid: z is a multiple of this.
pub const Z_UNIT: f64 = 1.0 / 8.0;
/// Values::Grid: y is a multiple of this, with every scale applied.
pub const Y_UNIT: f64 = 1.0 / 64.0;
/// Values::Grid: the same of pairs with vectors.
pub const SHAPED_UNIT: f64 = Y_UNIT / 2.0;

fn element(values: Values, part: Part, case: &Case, dice: &mut Dice) -> f32 {
    if part == Part::Gain {
        // One in four is 1, which has an arithmetic of its own; of the large values no product may overflow.
        return match (values, dice.below(4)) {
            (_, 0) => 1.0,
            (Values::Grid, _) => dice.whole(4) / 2.0,
            (Values::Large, _) => 1.0 + dice.unit() / 4.0,
            _ => dice.unit() * 3.0,
        };
    }
    let typed = if matches!(part, Part::A | Part::B) { case.weight } else { case.act };
    match values {
        Values::Grid => match part {
            Part::A | Part::B => dice.whole(2) / 2.0,
            Part::X => dice.whole(4) / 4.0,
            Part::Offset => dice.whole(32) / 8.0,
            _ => dice.whole(127) / 16.0,
        },
        Values::Real | Values::NonFinite => match part {
            Part::Y | Part::Offset => dice.unit() * 4.0,
            _ => dice.unit(),
        },
        Values::Subnormal => {
            // Around the smallest normal of the type, so that some are subnormal and some not; x brings f32
            // products down there too.
            let smallest = match typed {
                DType::F16 => 2f32.powi(-14),
                DType::F32 | DType::Bf16 => f32::MIN_POSITIVE,
            };
            match part {
                Part::B => dice.unit(),
                _ => dice.unit() * smallest * 4.0,
            }
        }
        Values::Large => {
            let (widths, largest) = (case.in_features as f32 * case.max_rank as f32, largest(case.act));
            match part {
                Part::A | Part::B => dice.unit(),
                // f16: the delta alone is of the type's size, so y passes its largest value in places. The
                // others share f32's range with the accumulators, whose partial sums must not overflow.
                Part::X if case.act == DType::F16 => dice.unit() * largest / widths.sqrt(),
                Part::X => dice.unit() * (largest / 8.0 / widths),
                Part::Offset => dice.unit() * largest / 16.0,
                _ => dice.unit() * largest * 0.99,
            }
        }
    }
}

fn largest(act: DType) -> f32 {
    match act {
        DType::F16 => 65504.0,
        DType::F32 | DType::Bf16 => f32::MAX,
    }
}
