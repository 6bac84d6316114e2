//! The parts of a launch that is made in several: some of its rows, some of its slots.

use crate::contract::Params;

/// Rows and slots of one launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// The first row, and how many.
    pub rows: (u32, u32),
    /// The first slot, and how many.
    pub slots: (u32, u32),
}

impl Window {
    /// The launches for so many rows and slots, of which each takes up to so many; 0: all.
    pub fn all(rows: (u32, u32), slots: (u32, u32)) -> impl Iterator<Item = Self> {
        let parts = |(all, most): (u32, u32)| {
            let step = if most == 0 { all } else { most };
            (0..all).step_by(step.max(1) as usize).map(move |first| (first, step.min(all - first)))
        };
        parts(rows).flat_map(move |rows| parts(slots).map(move |slots| Self { rows, slots }))
    }

    /// The parameters that say so, of a batch with `slots` slots.
    pub fn params(self, slots: u32) -> Params {
        Params {
            rows: self.rows.1,
            row_first: self.rows.0,
            slots,
            slot_first: self.slots.0,
            slot_count: self.slots.1,
            ..Params::default()
        }
    }
}
