//! Trials of the kernels of token ids and replaced rows: cases against what they must give, and properties to the bit.

use super::oracle::Check;
use super::token_case::{Case, Data};
use super::token_rig::Rig;
use super::{Outcome, Trial};
use crate::backend::GpuBackend;
use crate::contract::Kernel;
use crate::dtype::DType;
use crate::error::Result;

const KERNELS: [Kernel; 3] = [Kernel::EmbedShrink, Kernel::OverlayEmbed, Kernel::OverlayLogits];

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for kernel in KERNELS {
        for act in DType::ALL {
            for weight in DType::ALL {
                let base = Case { kernel, act, weight, ..Case::default() };
                cases.push(base.clone());
                cases.push(Case { width: 37, capacity: 5, pad: 3, shift: 1, rows: 17, ..base.clone() });
                cases.push(Case { width: 1, capacity: 1, vocabulary: 2, rows: 5, shift: 1, ..base.clone() });
                cases.push(Case { hostile: true, slots: 13, width: 24, ..base.clone() });
                cases.push(Case { width: 131, capacity: 131, pad: 1, chunk: 5, window: 2, ..base });
            }
        }
        let large = Case { kernel, act: DType::Bf16, weight: DType::F16, ..Case::default() };
        cases.push(Case { vocabulary: 151_937, capacity: 300, rows: 9, slots: 4, width: 20, ..large.clone() });
        cases.push(Case { rows: 1000, capacity: 3, slots: 5, width: 9, ..large.clone() });
        cases.push(Case { width: 512, capacity: 70, rows: 3, ..large.clone() });
        cases.push(Case { width: 300, vocabulary: 70_000, capacity: 20_000, rows: 4, slots: 2, ..large });
    }
    // More workgroups than a dimension of a grid holds.
    cases.push(Case { kernel: Kernel::OverlayEmbed, rows: 70_000, width: 3, ..Case::default() });
    cases
}

/// A property: its name, and what it checks on a case.
type Property = (&'static str, fn(&dyn GpuBackend, &Case) -> Result<Check>);

const PROPERTIES: [Property; 5] = [
    ("row alone = row in a batch", alone),
    ("any slot", any_slot),
    ("any capacity, stride and alignment", any_shape),
    ("rows and slots in parts", in_parts),
    ("graph = eager, every time", graph),
];

/// All trials of these kernels.
pub(super) fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = cases()
        .into_iter()
        .map(|case| {
            Trial::new(case.to_string(), move |backend| {
                let rig = Rig::new(backend, &case, Data::new(&case))?;
                Ok(Outcome::Checked(rig.check(&rig.run()?)?))
            })
        })
        .collect();
    for (name, check) in PROPERTIES {
        for kernel in KERNELS {
            for act in DType::ALL {
                let case =
                    Case { kernel, act, weight: DType::ALL[(act as usize + 1) % 3], width: 37, ..Case::default() };
                let run = move |backend: &dyn GpuBackend| check(backend, &case).map(Outcome::Checked);
                trials.push(Trial::new(format!("{}[{act}] to the bit: {name}", kernel.name()), run));
            }
        }
    }
    trials
}

/// Compares rows of two runs: `(row, other row)`.
fn same(rig: &Rig<'_>, out: &[u8], other: &Rig<'_>, other_out: &[u8], rows: &[(usize, usize)], check: &mut Check) {
    let dtype = rig.out.dtype;
    for (row, at) in rows {
        check.bits(rig.case.kernel.name(), *row, dtype, rig.row(out, *row), other.row(other_out, *at));
    }
}

fn alone(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let whole = Rig::new(backend, case, data.clone())?;
    let out = whole.run()?;
    let mut check = whole.check(&out)?;
    let rows = case.rows as usize;
    let mut orders: Vec<Vec<usize>> = [0, 5, 16, 32].map(|row| vec![row]).to_vec();
    orders.push((7..23).collect());
    orders.push((0..rows).map(|i| (i * 5 + 3) % rows).collect());
    for order in orders {
        let part = Case { rows: order.len() as u32, ..case.clone() };
        let part = Rig::new(backend, &part, data.select(case, &order))?;
        let places: Vec<_> = order.iter().copied().zip(0..).collect();
        same(&whole, &out, &part, &part.run()?, &places, &mut check);
    }
    Ok(check)
}

fn any_slot(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let mut data = Data::new(case);
    // One row, with every slot in turn, which all hold the same.
    data.held = vec![data.held[1].clone(); case.slots as usize];
    let row = (0..case.rows as usize).find(|row| data.ids[*row] < case.vocabulary).unwrap_or(0);
    data.ids[row] = data.held[0].as_ref().and_then(|held| held.ids.get(1).copied()).unwrap_or(data.ids[row]);
    let mut data = data.select(case, &vec![row; case.slots as usize]);
    data.slots = (0..case.slots as i32).collect();
    let rig = Rig::new(backend, &Case { rows: case.slots, ..case.clone() }, data)?;
    let out = rig.run()?;
    let mut check = rig.check(&out)?;
    let places: Vec<_> = (1..case.slots as usize).map(|row| (0, row)).collect();
    same(&rig, &out, &rig, &out, &places, &mut check);
    Ok(check)
}

fn any_shape(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let plain = Rig::new(backend, case, data.clone())?;
    let out = plain.run()?;
    let mut check = plain.check(&out)?;
    let places: Vec<_> = (0..case.rows as usize).map(|row| (row, row)).collect();
    for (capacity, pad, shift) in [(case.capacity + 1, 0, 0), (64, 1, 0), (case.capacity, 0, 1), (1000, 5, 3)] {
        let other = Rig::new(backend, &Case { capacity, pad, shift, ..case.clone() }, data.clone())?;
        same(&plain, &out, &other, &other.run()?, &places, &mut check);
    }
    Ok(check)
}

fn in_parts(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let data = Data::new(case);
    let whole = Rig::new(backend, case, data.clone())?;
    let out = whole.run()?;
    let mut check = whole.check(&out)?;
    for (chunk, window) in [(1, 0), (5, 0), (0, 1), (7, 2)] {
        let parts = Rig::new(backend, &Case { chunk, window, ..case.clone() }, data.clone())?;
        check.bits("memory", 0, whole.out.dtype, &out, &parts.run()?);
    }
    Ok(check)
}

fn graph(backend: &dyn GpuBackend, case: &Case) -> Result<Check> {
    let rig = Rig::new(backend, case, Data::new(case))?;
    let out = rig.run()?;
    let mut check = rig.check(&out)?;
    let graph = backend.capture(&mut |encoder| rig.record(encoder))?;
    for _ in 0..3 {
        check.bits("eager", 0, rig.out.dtype, &out, &rig.run()?);
        backend.submit(&mut |encoder| rig.reset(encoder))?;
        graph.replay()?;
        check.bits("replay", 0, rig.out.dtype, &out, &backend.read(rig.out.device())?);
    }
    Ok(check)
}
