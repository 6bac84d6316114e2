//! Properties that hold to the bit within a backend and an op.
//!
//! A row's bits depend on its own x, y, pair and scale and on the site's shape, on nothing else: not on
//! the rows around it, its slot, the tables' largest rank, strides, alignment, other sites of the launch,
//! how a batch is split into launches, or whether the launches are replayed from a graph.

use super::case::{Case, Mix, Ranks, Values};
use super::cases::FAST;
use super::data::Data;
use super::oracle::Check;
use super::raw::{Outputs, Rig};
use super::{Outcome, Trial};
use crate::backend::GpuBackend;
use crate::contract::Tile;
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::Op;

/// A property: its name, and what it checks on a case.
type Property = (&'static str, fn(&dyn GpuBackend, &Case) -> Result<Check>);

const PROPERTIES: [Property; 10] = [
    ("row alone = row in a batch", alone),
    ("any order of rows", shuffled),
    ("any slot", any_slot),
    ("any max_rank", any_max_rank),
    ("any stride and alignment", any_stride),
    ("site alone = site among others", site_alone),
    ("rows and slots in parts", in_parts),
    ("graph = eager, every time", graph),
    ("graph with another batch", graph_with_other_batches),
    ("a gain of 1 leaves an infinite y", infinite_y),
];

/// Every property, for both ops and each type.
pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (name, check) in PROPERTIES {
        for op in Op::ALL {
            for act in DType::ALL {
                for (how, case) in cases(op, act) {
                    // All rows of the one property have one x.
                    if case.gather > 0 && name == "any slot" {
                        continue;
                    }
                    let name = format!("{}[{act}x{}{how}] to the bit: {name}", op.name(), case.weight);
                    trials.push(Trial::new(name, move |backend| check(backend, &case).map(Outcome::Checked)));
                }
            }
        }
    }
    trials
}

/// What properties are checked on, and how that is other than usual.
fn cases(op: Op, act: DType) -> Vec<(String, Case)> {
    let usual = Case {
        op,
        act,
        weight: act,
        rows: 33,
        in_features: 131,
        outs: vec![37, 80],
        ranks: Ranks::Mixed,
        max_rank: 19,
        slots: 7,
        mix: Mix::Zipf,
        values: Values::Real,
        row_scales: true,
        nulls: true,
        vectors: true,
        ..Case::default()
    };
    let weights = [act, DType::Bf16, DType::F16].into_iter().take(if act == DType::F32 { 3 } else { 1 });
    let mut cases: Vec<_> = weights.map(|weight| (String::new(), Case { weight, ..usual.clone() })).collect();
    cases.push((",gather".into(), Case { gather: 9, ..usual.clone() }));
    if FAST.contains(&act) {
        let packs = op == Op::Bgmv;
        if packs {
            cases.push((",packs".into(), Case { packs, ..usual.clone() }));
        } else if act == DType::Bf16 {
            let one = Case { outs: vec![80], max_rank: 64, vectors: false, gather: 9, ..usual.clone() };
            cases.push((",counted".into(), Case { counted: true, ..one }));
        }
        // Ranks that fill B's rows, and outputs in whole tiles: kernels may have ways of their own for these.
        for rank in [8, 16, 32, 64] {
            let whole = Case { packs, ranks: Ranks::All(rank), max_rank: rank, outs: vec![64, 192], ..usual.clone() };
            cases.push((format!(",whole,r={rank}"), whole));
        }
    }
    cases
}

/// A rig and what it gave.
struct Done<'b> {
    rig: Rig<'b>,
    outputs: Outputs,
}

impl<'b> Done<'b> {
    fn new(backend: &'b dyn GpuBackend, case: &Case, data: Data) -> Result<Self> {
        let rig = Rig::with_data(backend, case, data)?;
        let outputs = rig.run()?;
        Ok(Self { rig, outputs })
    }

    /// Compares z and y of one of this run's rows with those of another run's.
    fn same(&self, (row, site): (usize, usize), other: &Done, (row2, site2): (usize, usize), check: &mut Check) {
        let (z, y) = self.rig.row(&self.outputs, row, site);
        let (z2, y2) = other.rig.row(&other.outputs, row2, site2);
        check.bits(&format!("z of site {site}"), row, DType::F32, z, z2);
        check.bits(&format!("y of site {site}"), row, self.rig.case.act, y, y2);
    }

    /// Compares all rows with those of a run of the same rows.
    fn all_same(&self, other: &Done, check: &mut Check) {
        for site in 0..self.rig.case.outs.len() {
            (0..self.rig.case.rows as usize).for_each(|row| self.same((row, site), other, (row, site), check));
        }
    }
}

fn alone(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let whole = Done::new(backend, case, data.clone())?;
    let mut check = Check::default();
    for (first, rows) in [(0, 1), (5, 1), (16, 1), (20, 1), (32, 1), (9, 2), (11, 7), (7, 16)] {
        let picked: Vec<usize> = (first..first + rows).collect();
        let part = Case { rows: rows as u32, ..case.clone() };
        let part = Done::new(backend, &part, data.select(case, &picked))?;
        for site in 0..case.outs.len() {
            (0..rows).for_each(|row| whole.same((first + row, site), &part, (row, site), &mut check));
        }
    }
    Ok(check)
}

fn shuffled(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let whole = Done::new(backend, case, data.clone())?;
    let mut check = Check::default();
    let rows = case.rows as usize;
    // 5 is prime to the number of rows: each row goes to another place, tiles are broken up.
    for step in [rows - 1, 5] {
        let order: Vec<usize> = (0..rows).map(|i| (i * step + 3) % rows).collect();
        let other = Done::new(backend, case, data.select(case, &order))?;
        for site in 0..case.outs.len() {
            order.iter().enumerate().for_each(|(i, row)| whole.same((*row, site), &other, (i, site), &mut check));
        }
    }
    Ok(check)
}

fn any_slot(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let slots: Vec<i32> = (0..case.slots as i32).rev().collect();
    let case = Case { rows: case.slots * 2, mix: Mix::These(slots), nulls: false, ..case.clone() };
    let mut data = Data::new(&case);
    // The same pair in every slot, the same x and y in every row.
    data.pairs = vec![data.pairs[0].clone(); case.slots as usize];
    data.row_scales.fill(0.3);
    let rows = case.rows as usize;
    data.x = [data.x(&case, 0).repeat(rows), vec![0.0; case.in_features as usize]].concat();
    for (y, out) in data.y.iter_mut().zip(&case.outs) {
        *y = y[..*out as usize * case.act.size() as usize].repeat(rows);
    }
    let done = Done::new(backend, &case, data)?;
    let mut check = done.rig.check(&done.outputs)?;
    for site in 0..case.outs.len() {
        (1..rows).for_each(|row| done.same((0, site), &done, (row, site), &mut check));
    }
    Ok(check)
}

fn any_max_rank(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let exact = Done::new(backend, case, data.clone())?;
    let mut check = Check::default();
    for max_rank in [case.max_rank + 1, 32, 64, 512].into_iter().filter(|more| *more > case.max_rank) {
        exact.all_same(&Done::new(backend, &Case { max_rank, ..case.clone() }, data.clone())?, &mut check);
    }
    Ok(check)
}

fn any_stride(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let plain = Done::new(backend, case, data.clone())?;
    let mut check = Check::default();
    for (pad, shift) in [(1, 0), (0, 1), (5, 2), (16, 3)] {
        for table_shift in [0, 1] {
            let case = Case { pad, shift, table_shift, shared_y: shift == 2, ..case.clone() };
            plain.all_same(&Done::new(backend, &case, data.clone())?, &mut check);
        }
    }
    Ok(check)
}

fn site_alone(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let both = Done::new(backend, case, data.clone())?;
    let mut check = Check::default();
    for site in 0..case.outs.len() {
        let mut only = data.clone();
        only.pairs.iter_mut().for_each(|slot| *slot = vec![slot[site].clone()]);
        only.y = vec![data.y[site].clone()];
        let only = Done::new(backend, &Case { outs: vec![case.outs[site]], ..case.clone() }, only)?;
        (0..case.rows as usize).for_each(|row| both.same((row, site), &only, (row, 0), &mut check));
    }
    Ok(check)
}

fn in_parts(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let whole = Done::new(backend, case, data.clone())?;
    let mut check = Check::default();
    for (chunk, window) in [(1, 0), (5, 0), (16, 0), (0, 1), (0, 3), (7, 2)] {
        whole.all_same(&Done::new(backend, &Case { chunk, window, ..case.clone() }, data.clone())?, &mut check);
    }
    Ok(check)
}

/// Without anything to add, y keeps its bits: a gain of 1 has no product with it.
fn infinite_y(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let mut data = Data::new(case);
    data.x.fill(0.0);
    for pair in data.pairs.iter_mut().flatten().flatten() {
        pair.vectors = pair.vectors.take().map(|[gain, offset]| [vec![1.0; gain.len()], vec![0.0; offset.len()]]);
    }
    for y in &mut data.y {
        let values = [f32::INFINITY, 1.0, f32::NEG_INFINITY, -2.5].into_iter().cycle();
        let values: Vec<f32> = values.take(y.len() / case.act.size() as usize).collect();
        y.clear();
        case.act.encode(&values, y);
    }
    let done = Done::new(backend, case, data.clone())?;
    let mut check = Check::default();
    for (site, out) in case.outs.iter().enumerate() {
        let width = (u64::from(*out) * case.act.size()) as usize;
        for (row, want) in data.y[site].chunks(width).enumerate() {
            check.bits(&format!("y of site {site}"), row, case.act, want, done.rig.row(&done.outputs, row, site).1);
        }
    }
    Ok(check)
}

/// Compares whole memories, guards and all.
fn identical(name: &str, want: &Outputs, got: &Outputs, act: DType, check: &mut Check) {
    check.bits(&format!("z, {name}"), 0, DType::F32, &want.z, &got.z);
    for (i, (want, got)) in want.y.iter().zip(&got.y).enumerate() {
        check.bits(&format!("y{i}, {name}"), 0, act, want, got);
    }
}

fn graph(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let eager = Done::new(backend, case, Data::new(case))?;
    let mut check = Check::default();
    for i in 0..5 {
        identical(&format!("eager run {i}"), &eager.outputs, &eager.rig.run()?, case.act, &mut check);
    }
    let graph = backend.capture(&mut |encoder| eager.rig.record(encoder))?;
    for i in 0..5 {
        backend.submit(&mut |encoder| eager.rig.reset(encoder))?;
        graph.replay()?;
        identical(&format!("replay {i}"), &eager.outputs, &eager.rig.outputs()?, case.act, &mut check);
    }
    // Two replays in a row add twice, like two eager runs.
    for _ in 0..2 {
        backend.submit(&mut |encoder| eager.rig.record(encoder))?;
    }
    let twice = eager.rig.outputs()?;
    backend.submit(&mut |encoder| eager.rig.reset(encoder))?;
    for _ in 0..3 {
        graph.replay()?;
    }
    identical("three replays", &twice, &eager.rig.outputs()?, case.act, &mut check);
    Ok(check)
}

fn graph_with_other_batches(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let mut check = Check::default();
    for rows in 1..=9 {
        let case = Case { rows, ..case.clone() };
        let mixed = Data::new(&case);
        let other = Data { slots: mixed.slots.iter().map(|slot| (slot + 1) % 3).collect(), ..mixed.clone() }.tiled();
        let mut none = Data { slots: vec![-1; rows as usize], ..mixed.clone() };
        // As many tiles as any batch of these rows may need; those of no use are empty.
        none.tiles = vec![Tile { slot: -1, ..Tile::default() }; 3 * rows as usize];
        let mut rig = Rig::with_data(backend, &case, none.clone())?;
        let graph = backend.capture(&mut |encoder| rig.record(encoder))?;
        for data in [&none, &mixed, &none, &other, &mixed] {
            let eager = Done::new(backend, &case, data.clone())?;
            rig.set_batch(data.clone())?;
            backend.submit(&mut |encoder| rig.reset(encoder))?;
            graph.replay()?;
            identical(&format!("{rows} rows"), &eager.outputs, &rig.outputs()?, case.act, &mut check);
        }
    }
    Ok(check)
}
