//! A launch of the kernels of token ids and replaced rows: its shapes, and made-up contents. Ids behind a slot's last one are
//! asked for by the batch.

use std::fmt;

use super::data::Dice;
use crate::contract::{Kernel, Spec, overlay_ids_bytes};
use crate::dtype::DType;

/// One launch, or one in parts, over one site.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub kernel: Kernel,
    pub act: DType,
    pub weight: DType,
    pub rows: u32,
    /// Largest rank of an embedding; width of a replaced row.
    pub width: u32,
    pub vocabulary: u32,
    /// Most rows of an overlay.
    pub capacity: u32,
    pub slots: u32,
    /// Elements of padding after each row of x, y and z.
    pub pad: u32,
    /// Elements by which they start past a multiple of 256 bytes.
    pub shift: u32,
    /// Rows and slots a launch takes; 0: all.
    pub chunk: u32,
    pub window: u32,
    /// Whether some slots have tables that no pool would write.
    pub hostile: bool,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            kernel: Kernel::OverlayEmbed,
            act: DType::F32,
            weight: DType::F32,
            rows: 33,
            width: 48,
            vocabulary: 131,
            capacity: 16,
            slots: 7,
            pad: 0,
            shift: 0,
            chunk: 0,
            window: 0,
            hostile: false,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, act, weight, rows, width, vocabulary, capacity, .. } = self;
        write!(f, "{}[{act}x{weight},width={width},vocabulary={vocabulary}", kernel.name())?;
        if *kernel != Kernel::EmbedShrink {
            write!(f, ",capacity={capacity}")?;
        }
        write!(f, ",rows={rows}")?;
        let numbers =
            [("slots", self.slots, 7), ("pad", self.pad, 0), ("shift", self.shift, 0), ("chunk", self.chunk, 0)];
        for (name, value, _) in
            numbers.into_iter().chain([("window", self.window, 0)]).filter(|(_, value, usual)| value != usual)
        {
            write!(f, ",{name}={value}")?;
        }
        f.write_str(if self.hostile { ",hostile]" } else { "]" })
    }
}

impl Case {
    pub fn spec(&self) -> Spec {
        Spec { act: self.act, weight: self.weight }
    }

    pub fn is_embedding(&self) -> bool {
        self.kernel == Kernel::EmbedShrink
    }

    pub fn a_stride(&self) -> u32 {
        self.width.next_multiple_of(crate::contract::STRIDE_ALIGN)
    }

    pub fn ids_bytes(&self) -> u64 {
        if self.is_embedding() { 0 } else { overlay_ids_bytes(self.capacity) }
    }

    /// Bytes of a slot.
    pub fn part_bytes(&self) -> u64 {
        let rows = if self.is_embedding() { self.vocabulary } else { self.capacity };
        self.ids_bytes() + u64::from(rows) * u64::from(self.a_stride()) * self.weight.size()
    }

    /// Elements of a row that is written.
    pub fn out_width(&self) -> u32 {
        if self.kernel == Kernel::OverlayLogits { self.vocabulary } else { self.width }
    }
}

/// What a slot has at the site.
#[derive(Clone, Debug)]
pub(super) struct Held {
    /// Ids that are replaced, ascending; of an embedding none.
    pub ids: Vec<u32>,
    /// Rank of an embedding; number of replaced rows.
    pub count: u32,
    /// Replaced rows, or `A^T[vocabulary][count]`.
    pub rows: Vec<f32>,
}

/// A case's contents.
#[derive(Clone, Debug)]
pub(super) struct Data {
    pub slots: Vec<i32>,
    pub scales: Vec<f32>,
    /// The token of each row.
    pub ids: Vec<u32>,
    /// `x[rows][width]`, values of the activation type.
    pub x: Vec<f32>,
    pub held: Vec<Option<Held>>,
    /// What is written, before: `[rows][out_width]`, encoded.
    pub out: Vec<u8>,
}

impl Data {
    pub fn new(case: &Case) -> Self {
        let mut dice = Dice::new(0x70c);
        let held: Vec<_> = (0..case.slots).map(|slot| held(case, slot, &mut dice)).collect();
        let slots: Vec<i32> = (0..case.rows)
            .map(|row| match dice.below(8) {
                0 => [-1, -2, i32::MIN][row as usize % 3],
                _ => dice.below(case.slots) as i32,
            })
            .collect();
        let ids = slots.iter().map(|slot| token(case, &held, *slot, &mut dice)).collect();
        let scales = slots.iter().map(|_| [1.0, 0.0, -0.5, 3.0][dice.below(4) as usize]).collect();
        let x = (0..case.rows * case.width).map(|_| case.act.round(dice.unit())).collect();
        // Any bits at all: most of them must be there afterwards.
        let size = if case.is_embedding() { 4 } else { case.act.size() };
        let out = (0..u64::from(case.rows) * u64::from(case.out_width()) * size).map(|_| dice.bits() as u8).collect();
        Self { slots, scales, ids, x, held, out }
    }

    pub fn held(&self, row: usize) -> Option<&Held> {
        self.held.get(usize::try_from(self.slots[row]).ok()?)?.as_ref()
    }

    /// These rows as a batch of their own.
    pub fn select(&self, case: &Case, rows: &[usize]) -> Self {
        let width = case.width as usize;
        let bytes = self.out.len() / self.slots.len();
        Self {
            slots: rows.iter().map(|row| self.slots[*row]).collect(),
            scales: rows.iter().map(|row| self.scales[*row]).collect(),
            ids: rows.iter().map(|row| self.ids[*row]).collect(),
            x: rows.iter().flat_map(|row| self.x[row * width..(row + 1) * width].to_vec()).collect(),
            held: self.held.clone(),
            out: rows.iter().flat_map(|row| self.out[row * bytes..(row + 1) * bytes].to_vec()).collect(),
        }
    }
}

/// Slot 2 is empty, slot 1 full, slot 3 has one row.
fn held(case: &Case, slot: u32, dice: &mut Dice) -> Option<Held> {
    if slot == 2 || (case.hostile && slot % 2 == 1) {
        return None;
    }
    let most = if case.is_embedding() { case.width } else { case.capacity.min(case.vocabulary) };
    let count = match slot {
        1 => most,
        3 => 1,
        _ => 1 + dice.below(most),
    };
    let (rows, ids) = match case.is_embedding() {
        true => (case.vocabulary * count, Vec::new()),
        false => {
            // Spread over the vocabulary, its first and last id among them.
            let mut ids: Vec<u32> =
                (0..count).map(|i| (u64::from(i) * u64::from(case.vocabulary) / u64::from(count)) as u32).collect();
            if slot.is_multiple_of(2) {
                let last = ids.len() - 1;
                ids[last] = case.vocabulary - 1;
            }
            (count * case.width, ids)
        }
    };
    Some(Held { ids, count, rows: (0..rows).map(|_| case.weight.round(dice.unit())).collect() })
}

/// A token: often one of its slot's, often one beside, sometimes none of the vocabulary.
fn token(case: &Case, held: &[Option<Held>], slot: i32, dice: &mut Dice) -> u32 {
    let of_slot = usize::try_from(slot).ok().and_then(|slot| held[slot].as_ref()).filter(|held| !held.ids.is_empty());
    match (dice.below(8), of_slot) {
        (0, _) => [case.vocabulary, u32::MAX, case.vocabulary + 1][dice.below(3) as usize],
        (1, Some(held)) => held.ids[0],
        (2, Some(held)) => held.ids[held.ids.len() - 1],
        (3, Some(held)) => held.ids[held.ids.len() - 1] + 1,
        (4 | 5, Some(held)) => held.ids[dice.below(held.ids.len() as u32) as usize],
        (6, Some(held)) => held.ids[dice.below(held.ids.len() as u32) as usize].wrapping_add(1),
        _ => dice.below(case.vocabulary),
    }
}
