//! A case: shapes, types and contents of one shrink and expand, as data.

use std::fmt;

use crate::backend::Caps;
use crate::contract::{Kernel, Spec, vector_len};
use crate::dtype::DType;
use crate::ops::Op;

/// The kernels of an op: the one that makes z, and the one that adds to y.
pub(super) fn kernels(op: Op) -> [Kernel; 2] {
    match op {
        Op::Bgmv => [Kernel::BgmvShrink, Kernel::BgmvExpand],
        Op::Sgmv => [Kernel::SgmvShrink, Kernel::SgmvExpand],
    }
}

/// Which adapters the rows of a batch have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mix {
    /// Row i has slot i mod slots.
    Distinct,
    /// Any slot or none, with the same chance; none is -1, -2 or the smallest i32.
    Uniform,
    /// Slot s with a chance of 1/(s+1), one row in eight without.
    Zipf,
    /// No row has an adapter.
    Base,
    /// These slots, over and over; any value.
    These(Vec<i32>),
}

/// True ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranks {
    /// All pairs have this one.
    All(u32),
    /// Every pair has its own, 1..=max_rank.
    Mixed,
}

/// What kind of numbers the operands hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// Small multiples of powers of two: sums are exact in f32 in any order, so results are judged to
    /// the bit, ties of the one rounding included.
    Grid,
    /// Values of every mantissa, judged by the bound.
    Real,
    /// Values down among the type's subnormals.
    Subnormal,
    /// Values whose results come near the type's largest, and beyond it in places.
    Large,
    /// As `Real`, but one row's x holds NaN and infinities, which must not reach other rows.
    NonFinite,
}

/// One shrink and expand of up to four sites over one batch.
#[derive(Clone, Debug)]
pub struct Case {
    /// Which pair of kernels.
    pub op: Op,
    /// Element type of x and y.
    pub act: DType,
    /// Element type of A and B.
    pub weight: DType,
    /// Rows of the batch.
    pub rows: u32,
    /// Elements of x.
    pub in_features: u32,
    /// Outputs of each site.
    pub outs: Vec<u32>,
    /// True ranks.
    pub ranks: Ranks,
    /// Largest rank, as the tables' strides are made for.
    pub max_rank: u32,
    /// Slots in the tables.
    pub slots: u32,
    /// Which slots the rows have.
    pub mix: Mix,
    /// What numbers.
    pub values: Values,
    /// Whether some slots have no pair at some sites, in each way that tables can say so.
    pub nulls: bool,
    /// Whether rows have multipliers of their own: 0 and negative ones among them.
    pub row_scales: bool,
    /// Elements of padding after each row of x, y and z.
    pub pad: u32,
    /// Elements by which x, y and z start past a multiple of 256 bytes.
    pub shift: u32,
    /// Whether all sites write parts of one y.
    pub shared_y: bool,
    /// Rows a launch takes; 0: all.
    pub chunk: u32,
    /// Slots a launch takes; 0: all.
    pub window: u32,
    /// Whether a launch of some slots gets the weights of all, not just theirs.
    pub all_weights: bool,
    /// Words by which the table arrays start off multiples of 4.
    pub table_shift: u32,
    /// Rows of x, of which each row of the batch names one, or one that isn't there; 0: each row has its own.
    pub gather: u32,
    /// Whether the batch has packs, so that kernels may take a slot's rows together and leave z in parts.
    pub packs: bool,
    /// Whether slots are said to be those of experts, and the batch tells how many of its tiles are in use, and has some more.
    pub counted: bool,
    /// Whether x, y and z lie in one allocation.
    pub one_allocation: bool,
    /// Whether some pairs have vectors behind B, others none.
    pub vectors: bool,
    /// Whether the expand's spans end 16 bytes before the vectors do: rows of pairs that have them keep their bits.
    pub short_span: bool,
    /// Tables full of values that no pool would write; the rows concerned must keep their bits.
    pub hostile: bool,
}

impl Default for Case {
    /// A small plain case: 7 rows, three slots, one site of 48 by 48, rank 8, all f32.
    fn default() -> Self {
        Self {
            op: Op::Bgmv,
            act: DType::F32,
            weight: DType::F32,
            rows: 7,
            in_features: 48,
            outs: vec![48],
            ranks: Ranks::All(8),
            max_rank: 8,
            slots: 3,
            mix: Mix::Uniform,
            values: Values::Grid,
            nulls: false,
            row_scales: false,
            pad: 0,
            shift: 0,
            shared_y: false,
            chunk: 0,
            window: 0,
            all_weights: false,
            table_shift: 0,
            gather: 0,
            packs: false,
            counted: false,
            one_allocation: false,
            vectors: false,
            short_span: false,
            hostile: false,
        }
    }
}

impl Case {
    /// What its kernels are specialised on.
    pub fn spec(&self) -> Spec {
        Spec { act: self.act, weight: self.weight }
    }

    /// Rows of x.
    pub fn x_rows(&self) -> u32 {
        if self.gather == 0 { self.rows } else { self.gather }
    }

    /// Elements between rows of A: whole 16-byte units.
    pub fn a_stride(&self) -> u32 {
        self.in_features.next_multiple_of(crate::contract::STRIDE_ALIGN)
    }

    /// Elements between rows of B.
    pub fn b_stride(&self) -> u32 {
        self.max_rank.next_multiple_of(crate::contract::STRIDE_ALIGN)
    }

    /// Bytes of a slot's A at a site.
    pub fn a_bytes(&self) -> u64 {
        u64::from(self.max_rank) * u64::from(self.a_stride()) * self.weight.size()
    }

    /// Bytes of a slot's B at a site, without vectors.
    pub fn b_bytes(&self, site: usize) -> u64 {
        u64::from(self.outs[site]) * u64::from(self.b_stride()) * self.weight.size()
    }

    /// Bytes of one vector behind a site's B; 0 where the case has none.
    pub fn vector_bytes(&self, site: usize) -> u64 {
        if self.vectors { 4 * vector_len(self.outs[site]) } else { 0 }
    }

    /// Bytes of a slot in the weights.
    pub fn slot_bytes(&self) -> u64 {
        (0..self.outs.len()).map(|site| self.a_bytes() + self.b_bytes(site) + 2 * self.vector_bytes(site)).sum()
    }

    /// Why a device can't run it, if so: an operand larger than it binds, or operands that share memory
    /// where they are bindings, which can't be read and written at once.
    pub fn too_large(&self, caps: &Caps) -> Option<String> {
        if self.one_allocation && caps.max_binding != u64::MAX {
            return Some("x, y and z in one allocation; operands are bindings here".to_owned());
        }
        let rows = u64::from(self.rows);
        let out = self.outs.iter().max().copied().unwrap_or(0) + self.pad;
        let window = if self.window == 0 || self.all_weights { self.slots } else { self.window };
        let largest = (rows * u64::from(out.max(self.in_features + self.pad)) * 4)
            .max(rows * u64::from(self.max_rank + self.pad) * 4 * self.outs.len() as u64)
            .max(u64::from(window) * self.slot_bytes());
        (largest > caps.max_binding.min(caps.max_alloc)).then(|| {
            format!("an operand of {largest} bytes; the device binds {}", caps.max_binding.min(caps.max_alloc))
        })
    }
}

impl fmt::Display for Case {
    /// The parameters, as trial names carry them; those at their defaults are left out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}x{},", self.op.name(), self.act, self.weight)?;
        match self.ranks {
            Ranks::All(r) if r == self.max_rank => write!(f, "r={r}")?,
            Ranks::All(r) => write!(f, "r={r}of{}", self.max_rank)?,
            Ranks::Mixed => write!(f, "r=1..{}", self.max_rank)?,
        }
        let outs: Vec<_> = self.outs.iter().map(u32::to_string).collect();
        write!(f, ",in={},out={},rows={}", self.in_features, outs.join("+"), self.rows)?;
        match &self.mix {
            Mix::Distinct => write!(f, ",distinct")?,
            Mix::Uniform => write!(f, ",uniform")?,
            Mix::Zipf => write!(f, ",zipf")?,
            Mix::Base => write!(f, ",base")?,
            Mix::These(slots) => write!(f, ",slots={slots:?}")?,
        }
        match self.values {
            Values::Grid => {}
            Values::Real => write!(f, ",real")?,
            Values::Subnormal => write!(f, ",subnormal")?,
            Values::Large => write!(f, ",large")?,
            Values::NonFinite => write!(f, ",nonfinite")?,
        }
        let numbers = [
            ("slots", self.slots, 3),
            ("pad", self.pad, 0),
            ("shift", self.shift, 0),
            ("chunk", self.chunk, 0),
            ("window", self.window, 0),
            ("table_shift", self.table_shift, 0),
            ("gather", self.gather, 0),
        ];
        for (name, value, usual) in numbers {
            if value != usual {
                write!(f, ",{name}={value}")?;
            }
        }
        let flags = [
            ("nulls", self.nulls),
            ("row_scales", self.row_scales),
            ("all_weights", self.all_weights),
            ("shared_y", self.shared_y),
            ("packs", self.packs),
            ("counted", self.counted),
            ("one_allocation", self.one_allocation),
            ("vectors", self.vectors),
            ("short_span", self.short_span),
            ("hostile", self.hostile),
        ];
        for (name, set) in flags {
            if set {
                write!(f, ",{name}")?;
            }
        }
        f.write_str("]")
    }
}
