//! The smallest complete host: two adapters in a pool, one captured step, a swap that the step never notices.
//!
//!     cargo run --release --example embed

use std::path::Path;

use lorapool::adapter::{BaseModel, load};
use lorapool::backend::best;
use lorapool::manager::{LoraAdapterInput, LoraWeights, SlotRef};
use lorapool::ops::{Applier, Matrix, Op, Output};
use lorapool::pool::{Capacity, PoolSpec};
use lorapool::{DType, Result};

fn main() -> Result<()> {
    // Adapters as PEFT saved them. Every tensor is applied, or the error says which one is not.
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let base = BaseModel::open(fixtures.join("_base/llama"))?;
    let [sql, chat, code] =
        ["01_plain_f32", "04_rslora_r6", "07_rank_pattern"].map(|dir| load(fixtures.join(dir), Some(&base)));
    let (sql, chat, code) = (sql?, chat?, code?);

    // A pool of two slots over every linear of the base. Its addresses never change.
    let gpu = best()?;
    let spec = PoolSpec::for_base(&base, 16, 2, DType::Bf16);
    let first = [LoraAdapterInput { name: "sql", adapter: &sql }, LoraAdapterInput { name: "chat", adapter: &chat }];
    let mut weights = LoraWeights::load(&gpu, spec, &first)?;
    let pool = weights.storage().clone();

    // A host engine has x and y in its own buffers; here they are ours: four rows, one site.
    let site = pool.site_at("model.layers.0.self_attn.q_proj").expect("a Llama has it");
    let (width, rows) = (48, 4);
    let x = Matrix::new(gpu.alloc(u64::from(rows * width) * 4, "x")?, width);
    let y = Matrix::new(gpu.alloc(u64::from(rows * width) * 4, "y")?, width);
    let ones: Vec<u8> = 1f32.to_le_bytes().repeat((rows * width) as usize);

    // Capture the step once: y[row] += scale * B * A * x[row], for whatever batch is written before a replay.
    let batch = [weights.slot_of("sql"), weights.slot_of("chat"), None, weights.slot_of("sql")];
    let slot = |slot: Option<usize>| (slot.map_or(SlotRef::Base, |slot| SlotRef::Slot(slot as u32)), 1.0);
    let plan = weights.plan(batch.map(slot))?;
    let capacity = Capacity::any(rows);
    let applier = Applier::new(&*gpu, &pool, DType::F32, capacity)?;
    let step =
        gpu.capture(&mut |encoder| applier.encode(encoder, &pool, Op::Bgmv, capacity, &x, &[Output { site, y: &y }]))?;

    // Replays of the one graph: before the swap, and after it.
    let run = || -> Result<()> {
        gpu.submit(&mut |encoder| {
            encoder.write(x.region(), &ones)?;
            encoder.write(y.region(), &ones)?;
            applier.write_batch(encoder, &plan, capacity)
        })?;
        step.replay()?;
        let values = DType::F32.decode(&gpu.read(y.region())?);
        for (row, who) in ["slot 0", "slot 1", "base", "slot 0"].iter().enumerate() {
            println!("  row {row} ({who}): {:?} ...", &values[row * width as usize..][..4]);
        }
        Ok(())
    };
    println!("on {}: sql in slot 0, chat in slot 1", gpu.caps().device);
    run()?;
    weights.swap(0, LoraAdapterInput { name: "code", adapter: &code })?;
    println!("code in slot 0 instead of sql, the same graph:");
    run()
}
