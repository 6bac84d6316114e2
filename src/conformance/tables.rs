//! Embeddings and replaced token rows of a pool that adapters are in already, checked as a host would use them.

use super::data::Dice;
use super::oracle::{Check, Expected, dot};
use super::token_bench::{Input, added};
use crate::adapter::{Adapter, HostTokens};
use crate::backend::{Encoder, GpuBackend};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::Region;
use crate::ops::{Applier, Matrix, Op, Output};
use crate::pool::{Plan, Pool, SiteKind, SiteSpec};

/// Checks every embedding of `pool`, and every site for token rows both as an embedding's and as a head's, for one batch of
/// made-up tokens and activations. `slots`: what each slot holds. A pool without such sites checks nothing.
///
/// # Errors
/// The device's.
pub fn check_tables(
    backend: &dyn GpuBackend,
    pool: &Pool,
    slots: &[&Adapter],
    (op, plan): (Op, &Plan),
    act: DType,
    seed: u64,
) -> Result<Check> {
    let mut check = Check::default();
    if pool.sites().iter().all(|site| site.kind == SiteKind::Linear) {
        return Ok(check);
    }
    let applier = Applier::new(backend, pool, act, plan.capacity())?;
    for (index, site) in pool.sites().iter().enumerate() {
        let uses: &[Use] = match site.kind {
            SiteKind::Linear => &[],
            SiteKind::Embedding => &[Use::Embedding],
            SiteKind::TokenRows { .. } => &[Use::Rows, Use::Logits],
        };
        for used in uses {
            let table = Table { backend, pool, applier: &applier, slots, plan, site, index, used: *used };
            check.merge(table.check(op, &mut Dice::new(seed ^ index as u64))?);
        }
    }
    Ok(check)
}

/// What a site is used for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    Embedding,
    Rows,
    Logits,
}

struct Table<'a> {
    backend: &'a dyn GpuBackend,
    pool: &'a Pool,
    applier: &'a Applier,
    slots: &'a [&'a Adapter],
    plan: &'a Plan,
    site: &'a SiteSpec,
    index: usize,
    used: Use,
}

impl Table<'_> {
    fn check(&self, op: Op, dice: &mut Dice) -> Result<Check> {
        let (act, rows) = (self.applier.act(), self.plan.rows().len());
        let (width, vocabulary) = match self.used {
            Use::Embedding => (self.site.out_features, self.site.in_features),
            Use::Rows => (self.site.in_features, self.site.out_features),
            Use::Logits => (self.site.out_features, self.site.out_features),
        };
        let (width, depth) = (width as usize, self.site.in_features as usize);
        let mut check = Check::default();
        if rows == 0 {
            return Ok(check);
        }
        // Every other row has a token that its adapter replaces, if there is any.
        let ids: Vec<u32> = (0..rows)
            .map(|row| match self.tokens(row).filter(|_| row % 2 == 0) {
                Some(tokens) => tokens.ids[dice.below(tokens.ids.len() as u32) as usize],
                None => dice.below(vocabulary),
            })
            .collect();
        let columns = if self.used == Use::Logits { depth } else { 0 };
        let mut values = |count: usize| -> Vec<f32> { (0..count).map(|_| act.round(dice.unit())).collect() };
        let (x, before) = (values(rows * columns), values(rows * width));
        let upload = |bytes: &mut Vec<u8>| -> Result<Region> {
            bytes.resize(bytes.len().next_multiple_of(4).max(4), 0);
            let region = self.backend.alloc(bytes.len() as u64, "activations")?;
            self.backend.submit(&mut |encoder| encoder.write(&region, bytes))?;
            Ok(region)
        };
        let encoded = |values: &[f32]| {
            let mut bytes = Vec::new();
            act.encode(values, &mut bytes);
            bytes
        };
        let ids_at = upload(&mut bytemuck::cast_slice(&ids).to_vec())?;
        let x_at = Matrix::new(upload(&mut encoded(&x))?, depth as u32);
        let y = Matrix::new(upload(&mut encoded(&before))?, width as u32);
        let output = Output { site: self.index, y: &y };
        let capacity = self.plan.capacity();
        self.backend.submit(&mut |encoder: &mut dyn Encoder| {
            self.applier.write_batch(encoder, self.plan, capacity)?;
            match self.used {
                Use::Embedding => self.applier.encode_embedding(encoder, self.pool, op, capacity, &ids_at, output),
                Use::Rows => self.applier.encode_token_rows(encoder, self.pool, capacity, &ids_at, output),
                Use::Logits => self.applier.encode_logits(encoder, self.pool, capacity, &x_at, output),
            }
        })?;
        let got = act.decode(&self.backend.read(y.region())?[..rows * width * act.size() as usize]);
        for row in 0..rows {
            let before = &before[row * width..(row + 1) * width];
            let expected = self.expected(row, ids[row], &x[row * columns..(row + 1) * columns], before);
            check.row(&self.site.id.path, row, act, &expected, &got[row * width..(row + 1) * width]);
        }
        Ok(check)
    }

    fn adapter(&self, row: usize) -> Option<&Adapter> {
        self.slots.get(usize::try_from(self.plan.rows()[row].slot).ok()?).copied()
    }

    fn tokens(&self, row: usize) -> Option<&HostTokens> {
        let tokens = &self.adapter(row)?.tokens;
        tokens.iter().find(|tokens| tokens.site.path == self.site.id.path && !tokens.ids.is_empty())
    }

    /// What a row must be.
    fn expected(&self, row: usize, id: u32, x: &[f32], before: &[f32]) -> Expected {
        let act = self.applier.act();
        let mut kept =
            Expected { want: before.iter().map(|y| f64::from(*y)).collect(), bound: vec![0.0; before.len()] };
        if self.used == Use::Embedding {
            let here = |adapter: &Adapter| {
                let pair = adapter.pairs.iter().find(|pair| pair.site.path == self.site.id.path)?;
                let types = (act, self.pool.layout().dtype());
                Some(added(pair, Input::Token(id), self.plan.rows()[row].scale, before, types))
            };
            return self.adapter(row).and_then(here).unwrap_or(kept);
        }
        let (Some(tokens), SiteKind::TokenRows { dtype, .. }) = (self.tokens(row), self.site.kind) else { return kept };
        let Ok(rows) = tokens.rows.to(dtype) else { return kept };
        let of = |j: usize| -> Vec<f32> {
            let bytes = tokens.rows.cols * dtype.size() as usize;
            dtype.decode(&rows[j * bytes..(j + 1) * bytes])
        };
        match (self.used, tokens.ids.binary_search(&id)) {
            (Use::Logits, _) => {
                for (j, id) in tokens.ids.iter().enumerate() {
                    let one = dot(&of(j), x, act);
                    (kept.want[*id as usize], kept.bound[*id as usize]) = (one.want[0], one.bound[0]);
                }
            }
            (_, Ok(j)) => kept.want = of(j).iter().map(|value| f64::from(act.round(*value))).collect(),
            (_, Err(_)) => {}
        }
        kept
    }
}
