//! The kernels as plain loops, each of which can be told to be wrong.

use super::naive::bytes;
use crate::backend::Pipeline;
use crate::contract::{
    Kernel, Params, RANK_MASK, RANK_VECTORS, ROUTED_OFFSETS, ROUTED_TOKENS, RowRef, SGMV_TILE_ROWS, THREADS, Tile,
    vector_len,
};
use crate::dtype::DType;
use crate::memory::Region;

/// A way to be wrong, each one that some kernel has been in public.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    RankRoundedUp,
    LastInputDropped,
    ScaleOfSlotZero,
    RowScaleIgnored,
    SkippedRowAddsZero,
    RoundedTwice,
    Truncated,
    WritesPadding,
    LargeWindow,
    TablesTrusted,
    SiteOffsetIgnored,
    NeighbourLost,
    SumDependsOnSlot,
    SumDependsOnRows,
    OverlayOfSlotZero,
    LastIdMissed,
    CountIgnored,
    IdWraps,
    LogitsAdded,
    ReplacedRowsScaled,
    VectorsIgnored,
    VectorsPastSpan,
    OffsetNotByRow,
    GainOfYAlone,
    GainMinusOneOfInfinity,
    XRowsIgnored,
    XRowsTrusted,
    XRowsFromTheLaunch,
    ExpertsTrusted,
    SlotsTrusted,
    TilesAcrossGroups,
    OldTilesStay,
    LastExpertLost,
}

/// expert_rows, a row after the other.
fn routed(fault: Fault, operands: &[Region], p: &Params) {
    let words: Vec<Vec<u32>> =
        operands.iter().map(|r| bytes(r, |b| bytemuck::pod_collect_to_vec::<u8, u32>(b))).collect();
    let expert = |row: u32| match p.routed & ROUTED_OFFSETS {
        0 => words[1][row as usize],
        _ => {
            let ends = words[1].windows(2).take(p.experts as usize);
            ends.enumerate().find(|(_, e)| (e[0]..e[1]).contains(&row)).map_or(u32::MAX, |(expert, _)| expert as u32)
        }
    };
    let row = |row: u32| {
        let token = if p.routed & ROUTED_TOKENS == 0 { row } else { words[3][row as usize] } / p.top_k;
        let mut expert = expert(row);
        if fault == Fault::ExpertsTrusted {
            expert = expert.min(p.slot_stride - 1);
        }
        let most = p.experts - u32::from(fault == Fault::LastExpertLost);
        if token >= p.x_rows || expert >= most && fault != Fault::ExpertsTrusted {
            return (u32::MAX, 0, u32::MAX);
        }
        let (slot, scale) = (words[0][2 * token as usize], words[0][2 * token as usize + 1]);
        if slot >= p.slots && !(fault == Fault::SlotsTrusted && slot == p.slots) {
            return (u32::MAX, 0, u32::MAX);
        }
        (slot * p.slot_stride + expert, scale, token)
    };
    let rows: Vec<_> = (0..p.rows).map(row).collect();
    let put = |at: usize, value: u32| {
        bytes(&operands[2], |b| b[4 * at..4 * at + 4].copy_from_slice(&value.to_ne_bytes()));
    };
    for (i, (slot, scale, token)) in rows.iter().enumerate() {
        put(2 * i, *slot);
        put(2 * i + 1, *scale);
        if p.x_rows_at != 0 {
            put(p.x_rows_at as usize + i, *token);
        }
    }
    if p.counts_at != 0 {
        let slots: Vec<u32> = rows.iter().map(|row| row.0).collect();
        for (group, slots) in slots.chunks(THREADS as usize).enumerate() {
            put(p.counts_at as usize + 1 + group, tiles_of(fault, slots).len() as u32);
        }
    }
}

/// Tiles in use of rows of these slots.
fn tiles_of(fault: Fault, slots: &[u32]) -> Vec<[u32; 4]> {
    let group = if fault == Fault::TilesAcrossGroups { 2 * THREADS } else { THREADS } as usize;
    let rows: Vec<(usize, u32)> = slots.iter().copied().enumerate().collect();
    let runs = rows.chunks(group).flat_map(|rows| rows.chunk_by(|a, b| a.1 == b.1));
    let tiles = runs.flat_map(|run| run.chunks(SGMV_TILE_ROWS as usize)).filter(|tile| (tile[0].1 as i32) >= 0);
    tiles.map(|tile| [tile[0].1, tile[0].0 as u32, tile.len() as u32, 0]).collect()
}

/// expert_tiles.
fn routed_tiles(fault: Fault, operands: &[Region], p: &Params) {
    bytes(&operands[0], |b| {
        let words: &mut [u32] = bytemuck::cast_slice_mut(b);
        let slots: Vec<u32> = words.chunks(2).take(p.rows as usize).map(|row| row[0]).collect();
        let mut tiles = tiles_of(fault, &slots);
        words[p.counts_at as usize] = tiles.len() as u32;
        if fault != Fault::OldTilesStay {
            tiles.resize(slots.len(), [u32::MAX, 0, 0, 0]);
        }
        words[p.tiles_at as usize..][..4 * tiles.len()].copy_from_slice(tiles.as_flattened());
    });
}

/// What one launch does.
pub(super) fn kernel(fault: Fault, pipeline: &Pipeline, operands: &[Region], p: &Params) {
    match pipeline.kernel() {
        Kernel::ExpertRows => return routed(fault, operands, p),
        Kernel::ExpertTiles => return routed_tiles(fault, operands, p),
        _ => {}
    }
    if pipeline.kernel().is_tokens() {
        return tokens(fault, pipeline, operands, p);
    }
    let (expand, spec) = (pipeline.kernel().is_expand(), pipeline.spec());
    let words: Vec<Vec<u32>> =
        operands[..2].iter().map(|r| bytes(r, |b| bytemuck::pod_collect_to_vec::<u8, u32>(b))).collect();
    let row_ref = |row: u32| RowRef {
        slot: words[0][2 * row as usize] as i32,
        scale: f32::from_bits(words[0][2 * row as usize + 1]),
    };
    let mut rows: Vec<(u32, i32)> = Vec::new();
    if matches!(pipeline.kernel(), Kernel::BgmvShrink | Kernel::BgmvExpand) {
        rows.extend((p.row_first..p.row_first + p.rows).map(|row| (row, row_ref(row).slot)));
    } else {
        for t in 0..p.tiles as usize {
            let tile: Tile = *bytemuck::from_bytes(bytemuck::cast_slice(&words[0][p.tiles_at as usize + 4 * t..][..4]));
            let first = u64::from(tile.first_row);
            let end = first + u64::from(tile.rows.min(crate::contract::SGMV_TILE_ROWS));
            let window = u64::from(p.row_first)..u64::from(p.row_first) + u64::from(p.rows);
            rows.extend((first..end).filter(|row| window.contains(row)).map(|row| (row as u32, tile.slot)));
        }
    }
    let address = u64::from(p.weights_lo) | u64::from(p.weights_hi) << 32;
    let weights_len = u64::from(p.weights_len_lo) | u64::from(p.weights_len_hi) << 32;
    for (row, slot) in rows {
        for site in &p.site[..p.sites as usize] {
            let skip = |y: bool| {
                if fault == Fault::SkippedRowAddsZero && expand && y {
                    let (at, size) = (
                        u64::from(row - p.row_first) * u64::from(site.y_stride) + u64::from(site.y_offset),
                        spec.act.size(),
                    );
                    let y = operands[4 + site.y_operand as usize]
                        .slice(at * size, u64::from(site.out_features) * size)
                        .unwrap();
                    let sums: Vec<f32> = bytes(&y, |b| spec.act.decode(b)).iter().map(|y| y + 0.0).collect();
                    let mut out = Vec::new();
                    spec.act.encode(&sums, &mut out);
                    bytes(&y, |b| b.copy_from_slice(&out));
                }
            };
            let wide = u32::from(fault == Fault::LargeWindow);
            let window = i64::from(p.slot_first)..i64::from(p.slot_first + p.slot_count + wide);
            if !window.contains(&slot.into()) || slot as usize >= p.slots as usize {
                skip(true);
                continue;
            }
            let s = slot as usize;
            let t = |at: u32, i: usize| words[1][at as usize + i];
            let cell = u64::from(t(site.cells, 2 * s)) | u64::from(t(site.cells, 2 * s + 1)) << 32;
            let word = t(site.ranks, s);
            let (mut rank, scale) =
                (word & RANK_MASK, f32::from_bits(t(site.scales, if fault == Fault::ScaleOfSlotZero { 0 } else { s })));
            let over = cell
                .checked_sub(address)
                .is_none_or(|at| at.checked_add(u64::from(site.span) * 4).is_none_or(|end| end > weights_len));
            if cell == 0 || rank == 0 || over || rank > p.max_rank {
                if fault == Fault::TablesTrusted
                    && cell > address
                    && cell - address < weights_len
                    && rank == p.max_rank + 1
                {
                    rank = p.max_rank;
                } else {
                    continue;
                }
            }
            if fault == Fault::RankRoundedUp {
                rank = rank.next_multiple_of(8).min(p.max_rank);
            }
            let b_bytes = u64::from(site.out_features) * u64::from(p.b_stride) * spec.weight.size();
            let vector_bytes = 4 * vector_len(site.out_features);
            let shaped = expand && word & RANK_VECTORS != 0 && fault != Fault::VectorsIgnored;
            let past = b_bytes + 2 * vector_bytes > 4 * u64::from(site.span);
            if shaped && past && fault != Fault::VectorsPastSpan {
                continue;
            }
            let vector = |i: u64, n: u32| {
                let at = cell - address + b_bytes + i * vector_bytes + 4 * u64::from(n);
                bytes(&operands[2].slice(at, 4).unwrap(), |b| DType::F32.decode(b))[0]
            };
            let matrix = |row: u32, stride: u32, width: u32| {
                let at = cell - address + u64::from(row) * u64::from(stride) * spec.weight.size();
                let region = operands[2].slice(at, u64::from(width) * spec.weight.size()).unwrap();
                bytes(&region, |b| spec.weight.decode(b))
            };
            let local = u64::from(row - p.row_first);
            let z_offset = if fault == Fault::SiteOffsetIgnored { 0 } else { site.z_offset };
            let z = |r: &Region| {
                r.slice((local * u64::from(p.z_stride) + u64::from(z_offset)) * 4, u64::from(rank) * 4).unwrap()
            };
            if !expand {
                let from = match p.x_rows_at {
                    0 => local,
                    _ if fault == Fault::XRowsIgnored => local % u64::from(p.x_rows),
                    at if fault == Fault::XRowsFromTheLaunch => words[0][at as usize + local as usize].into(),
                    at => words[0][(at + row) as usize].into(),
                };
                let there = p.x_rows_at == 0 || from < p.x_rows.into();
                let from = if there { from } else { 0 };
                let width = u64::from(p.in_features) * spec.act.size();
                let x = operands[3].slice(from * u64::from(p.x_stride) * spec.act.size(), width).unwrap();
                let mut x = bytes(&x, |b| spec.act.decode(b));
                if !there && fault != Fault::XRowsTrusted {
                    x.fill(0.0);
                }
                if fault == Fault::LastInputDropped && x.len() > 8 {
                    *x.last_mut().unwrap() = 0.0;
                }
                let dot = |a: Vec<f32>| {
                    let mut terms: Vec<f32> = a.iter().zip(&x).map(|(a, x)| a * x).collect();
                    if fault == Fault::SumDependsOnSlot && s == 1 || fault == Fault::SumDependsOnRows && p.rows > 4 {
                        terms.reverse();
                    }
                    terms.iter().sum::<f32>()
                };
                let out: Vec<f32> = (0..rank).map(|r| dot(matrix(r, p.a_stride, p.in_features))).collect();
                bytes(&z(&operands[4]), |b| b.copy_from_slice(bytemuck::cast_slice(&out)));
            } else {
                let z = bytes(&z(&operands[3]), |b| DType::F32.decode(b));
                let row_scale = if fault == Fault::RowScaleIgnored { 1.0 } else { row_ref(row).scale };
                let at = local * u64::from(site.y_stride) + u64::from(site.y_offset);
                let (y, size) = (&operands[4 + site.y_operand as usize], spec.act.size());
                let extra = u32::from(fault == Fault::WritesPadding);
                for n in 0..site.out_features + extra {
                    let Ok(element) = y.slice((at + u64::from(n)) * size, size) else { continue };
                    let b = if n < site.out_features { matrix(n, p.b_stride, rank) } else { vec![1.0; rank as usize] };
                    let sum = b.iter().zip(&z).map(|(b, z)| b * z).sum::<f32>();
                    let mut delta = scale * row_scale * sum;
                    if shaped && n < site.out_features {
                        let (gain, offset) = (vector(0, n), vector(1, n));
                        let y = bytes(&element, |b| spec.act.decode(b))[0];
                        let plain = gain == 1.0 && fault != Fault::GainMinusOneOfInfinity;
                        let of_y = if plain { 0.0 } else { (gain - 1.0) * y };
                        let of_sum = if fault == Fault::GainOfYAlone { scale } else { scale * gain } * sum;
                        delta = match fault {
                            Fault::OffsetNotByRow => row_scale * (of_y + of_sum) + offset,
                            _ => row_scale * (of_y + offset + of_sum),
                        };
                    }
                    if fault == Fault::RoundedTwice {
                        delta = spec.act.round(delta);
                    }
                    bytes(&element, |bytes| {
                        let mut out = Vec::new();
                        let sum = spec.act.decode(bytes)[0] + delta;
                        match fault {
                            Fault::Truncated if spec.act == DType::Bf16 => {
                                out.extend_from_slice(&sum.to_le_bytes()[2..])
                            }
                            _ => spec.act.encode(&[sum], &mut out),
                        }
                        bytes.copy_from_slice(&out);
                    });
                    if fault == Fault::NeighbourLost
                        && size == 2
                        && n + 1 == site.out_features
                        && (at + u64::from(n)) % 2 == 0
                        && let Ok(next) = y.slice((at + u64::from(n) + 1) * size, size)
                    {
                        bytes(&next, |b| b.fill(0));
                    }
                }
            }
        }
    }
}

/// The kernels of token ids and replaced rows.
fn tokens(fault: Fault, pipeline: &Pipeline, operands: &[Region], p: &Params) {
    let (kernel, spec, site) = (pipeline.kernel(), pipeline.spec(), &p.site[0]);
    let words = |r: &Region| bytes(r, |b| bytemuck::pod_collect_to_vec::<u8, u32>(&b[..b.len() / 4 * 4]));
    let (batch, tables) = (words(&operands[0]), words(&operands[1]));
    let address = u64::from(p.weights_lo) | u64::from(p.weights_hi) << 32;
    let size = spec.weight.size();
    let ids = if kernel == Kernel::OverlayLogits { Vec::new() } else { words(&operands[3]) };
    #[expect(clippy::needless_range_loop, reason = "a row has more than its id")]
    for row in 0..p.rows as usize {
        let at = 2 * (p.row_first as usize + row);
        let (slot, scale) = (batch[at] as i32, f32::from_bits(batch[at + 1]));
        if !(i64::from(p.slot_first)..i64::from(p.slot_first + p.slot_count)).contains(&slot.into()) {
            continue;
        }
        let s = if fault == Fault::OverlayOfSlotZero { p.slot_first as usize } else { slot as usize };
        let t = |at: u32, i: usize| tables[at as usize + i];
        let cell = u64::from(t(site.cells, 2 * s)) | u64::from(t(site.cells, 2 * s + 1)) << 32;
        let mut count = t(site.ranks, s);
        let Some(part) = cell.checked_sub(address).filter(|_| cell != 0 && count != 0 && count <= p.max_rank) else {
            continue;
        };
        let Ok(part) = operands[2].slice(part, u64::from(site.span) * 4) else { continue };
        if fault == Fault::CountIgnored {
            count = p.max_rank;
        }
        let weights = |from: u64, row: u32, width: u32| {
            let at = from + u64::from(row) * u64::from(p.a_stride) * size;
            bytes(&part.slice(at, u64::from(width) * size).unwrap(), |b| spec.weight.decode(b))
        };
        let write = |operand: &Region, act: DType, at: u64, values: &[f32]| {
            let mut out = Vec::new();
            act.encode(values, &mut out);
            bytes(&operand.slice(at * act.size(), out.len() as u64).unwrap(), |b| b.copy_from_slice(&out));
        };
        let ids_bytes = crate::contract::overlay_ids_bytes(p.max_rank);
        let own = || words(&part.slice(0, ids_bytes).unwrap())[..count as usize].to_vec();
        let y = row as u64 * u64::from(site.y_stride) + u64::from(site.y_offset);
        match kernel {
            Kernel::EmbedShrink => {
                let z = row as u64 * u64::from(p.z_stride) + u64::from(site.z_offset);
                let id = if fault == Fault::IdWraps { ids[row] % p.in_features } else { ids[row] };
                let values = if id < p.in_features { weights(0, id, count) } else { vec![0.0; count as usize] };
                write(&operands[4], DType::F32, z, &values);
            }
            Kernel::OverlayEmbed => {
                let own = own();
                let searched = own.len() - usize::from(fault == Fault::LastIdMissed);
                let Ok(j) = own[..searched].binary_search(&ids[row]) else { continue };
                let mut values = weights(ids_bytes, j as u32, p.in_features);
                if fault == Fault::ReplacedRowsScaled {
                    values.iter_mut().for_each(|value| *value *= scale);
                }
                write(&operands[4], spec.act, y, &values);
            }
            _ => {
                let at = row as u64 * u64::from(p.x_stride) * spec.act.size();
                let x = operands[3].slice(at, u64::from(p.in_features) * spec.act.size()).unwrap();
                let x = bytes(&x, |b| spec.act.decode(b));
                for (j, id) in own().into_iter().enumerate().filter(|(_, id)| *id < site.out_features) {
                    let values = weights(ids_bytes, j as u32, p.in_features);
                    let mut sum: f32 = values.iter().zip(&x).map(|(a, x)| a * x).sum();
                    if fault == Fault::LogitsAdded {
                        let old = operands[4].slice((y + u64::from(id)) * spec.act.size(), spec.act.size()).unwrap();
                        sum += bytes(&old, |b| spec.act.decode(b))[0];
                    }
                    write(&operands[4], spec.act, y + u64::from(id), &[sum]);
                }
            }
        }
    }
}
