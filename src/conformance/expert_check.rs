//! Routed experts of a pool that adapters are in already, checked as a host would use them.

use super::data::Dice;
use super::expert_layers::{Layers, Order, Resident, Step};
use super::oracle::Check;
use crate::adapter::Adapter;
use crate::backend::GpuBackend;
use crate::contract::RowRef;
use crate::dtype::DType;
use crate::error::Result;
use crate::ops::{Applier, ExpertApplier, Op};
use crate::pool::{Capacity, Plan, Pool};

/// Experts of each token.
const TOP_K: u32 = 2;
/// Tokens at a time: what bounds the memory of a check.
const TOKENS: usize = 4096;

/// Checks every routed linear of `pool` for one batch of tokens, made-up activations and a made-up routing, by a captured
/// graph: with the tokens' inputs, as gate and up have them, and with inputs of the rows' own, as down has them. Rows are
/// in the order of their tokens for bgmv, sorted by expert for sgmv. Half of the experts are such as the token's adapter
/// has a pair for, in turns. `slots`: what each slot holds; `each` hears of a linear before it is checked. A pool without
/// experts checks nothing.
///
/// # Errors
/// The device's.
pub fn check_experts(
    backend: &dyn GpuBackend,
    pool: &Pool,
    slots: &[&Adapter],
    (op, plan): (Op, &Plan),
    act: DType,
    mut each: impl FnMut(&str),
) -> Result<Check> {
    let mut check = Check::default();
    let Some(experts) = pool.experts() else { return Ok(check) };
    let tokens = plan.rows().len().min(TOKENS) as u32;
    let layers = Layers {
        backend,
        pool: experts,
        tokens: &Applier::new(backend, pool, act, Capacity::of_slots(tokens, 0))?,
        applier: &ExpertApplier::new(backend, experts, act, tokens * TOP_K)?,
        resident: Resident::new(experts, slots.iter().map(|adapter| Some(*adapter))),
    };
    for (index, site) in experts.sites().iter().enumerate() {
        each(&site.id.path);
        for (part, batch) in plan.rows().chunks(TOKENS).enumerate() {
            let step = step(&layers.resident, (index, site.experts), op, batch, part as u64);
            for of_tokens in [true, false] {
                check.merge(layers.step(op, &step, (&[index], of_tokens), true, |_, _, _, _, expected| expected)?);
            }
        }
    }
    Ok(check)
}

/// A step of these tokens at one linear.
fn step(resident: &Resident<'_>, (site, experts): (usize, u32), op: Op, batch: &[RowRef], seed: u64) -> Step {
    let mut dice = Dice::new(seed ^ site as u64);
    let slots = batch.iter().map(|row| row.slot).max().unwrap_or(-1);
    let mut covered: Vec<_> = (0..=slots).map(|slot| resident.experts(slot, site).into_iter().cycle()).collect();
    let top_k = TOP_K.min(experts);
    let mut rows = Vec::with_capacity(batch.len() * top_k as usize);
    for (token, row) in (0..).zip(batch) {
        let turn = usize::try_from(row.slot).ok().and_then(|slot| covered.get_mut(slot)).and_then(Iterator::next);
        let first = turn.unwrap_or_else(|| dice.below(experts));
        rows.push((token, first));
        if top_k > 1 {
            rows.push((token, (first + 1 + dice.below(experts - 1)) % experts));
        }
    }
    let order = match op {
        Op::Bgmv => Order::Tokens,
        Op::Sgmv => Order::Offsets,
    };
    if order != Order::Tokens {
        rows.sort_by_key(|(_, expert)| *expert);
    }
    Step { batch: batch.to_vec(), experts, top_k, order, rows }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::adapter::{BaseModel, load};
    use crate::manager::{LoraAdapterInput, LoraWeights};
    use crate::pool::{ExpertSpec, PoolSpec};

    #[test]
    fn an_adapter_in_the_wrong_slot_and_one_wrong_expert_are_found() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let base = BaseModel::open(folder.join("_base/mixtral")).unwrap();
        let read = |name: &str| load(folder.join(name), Some(&base)).unwrap();
        let (one, two) = (read("24_moe_target_params_mixtral"), read("41_moe_v4_per_expert_keys"));
        let gpu = crate::backend::open("cpu", 0).unwrap();
        let dtype = DType::F32;
        let spec = PoolSpec::for_adapters([&one, &two], 2, dtype).unwrap();
        let experts = ExpertSpec::for_adapters([&one, &two], dtype).unwrap();
        let inputs = [("one", &one), ("two", &two)].map(|(name, adapter)| LoraAdapterInput { name, adapter });
        let weights = LoraWeights::load_with_experts(&gpu, spec, experts, &inputs).unwrap();
        let check = |op, slots: [&Adapter; 2]| {
            let plan = Plan::from_slots((0..60).map(|row| row % 3 - 1));
            check_experts(&*gpu, weights.storage(), &slots, (op, &plan), dtype, |_| ()).unwrap()
        };
        for op in Op::ALL {
            let right = check(op, [&one, &two]);
            assert!(right.passed() && right.elements == 60 * 2 * 2 * 2 * (40 + 48), "{right:?}");
            assert!(check(op, [&two, &one]).mismatches > right.elements / 4);
            for pair in 0..two.experts.len() {
                let mut other = two.clone();
                other.experts[pair].scale *= 1.5;
                let site = &other.experts[pair].site.path;
                let wrong = check(op, [&one, &other]);
                assert!(wrong.first.iter().any(|mismatch| mismatch.site == **site), "{op:?} {site}: {wrong:?}");
                other.experts.remove(pair);
                assert!(!check(op, [&one, &other]).passed(), "{op:?}: a pair that the device has and no one knows of");
            }
        }
    }
}
