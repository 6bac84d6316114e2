//! What can go wrong below the loader: devices, memory, shapes, slots.

use crate::adapter::Reject;

/// Result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error with a stable code ([`Error::code`]). The loader's own, one code per kind of fault in a
/// file, are in [`Reject`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The adapter's files say something that can't be served. Nothing was changed.
    #[error(transparent)]
    Reject(#[from] Box<Reject>),

    /// A backend can't be used here at all: no driver, no device, a missing capability.
    #[error("{backend} is not available: {reason}")]
    Unavailable {
        /// `cpu`, `cuda`, `vulkan` or `webgpu`.
        backend: &'static str,
        /// What was looked for and what was found.
        reason: String,
    },

    /// The driver refused a call. The message is the driver's own word.
    #[error("{call}: {message}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The driver's error.
        message: String,
    },

    /// The device has no room. Unlike [`Error::Limit`], another time or another device may have.
    #[error("out of device memory: {requested} bytes for {label}")]
    OutOfMemory {
        /// Bytes asked for.
        requested: u64,
        /// What for.
        label: String,
    },

    /// A size is beyond what this pool or device was set up for; asking again can't help.
    #[error("{what} is {found}, the limit is {limit}{hint}")]
    Limit {
        /// The quantity.
        what: &'static str,
        /// Its value.
        found: u64,
        /// The largest value that works.
        limit: u64,
        /// ` (raise --max-rank)` or empty.
        hint: &'static str,
    },

    /// A weight is too large for the type that the pool stores. Nothing was changed.
    #[error("{tensor}: element {index} is {value}, beyond the range of {dtype} (choose bf16 or f32 for the pool)")]
    Overflow {
        /// Which matrix of which site.
        tensor: String,
        /// Row-major index of the first such element.
        index: usize,
        /// Its value.
        value: f32,
        /// The pool's type.
        dtype: crate::dtype::DType,
    },

    /// A region is too small for the bytes asked of it.
    #[error("bytes {offset}..{offset}+{len} lie outside a region of {available} bytes")]
    OutOfBounds {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Size of the region.
        available: u64,
    },

    /// Operands of one call contradict each other.
    #[error("{what}: found {found}, expected {expected}")]
    Shape {
        /// The operand.
        what: String,
        /// What it is.
        found: String,
        /// What it had to be.
        expected: String,
    },

    /// No resident adapter has this name.
    #[error("no adapter named {name:?} is resident; resident: {resident:?}")]
    UnknownAdapter {
        /// The name asked for.
        name: String,
        /// Names that would have worked.
        resident: Vec<String>,
    },

    /// A request wants the active adapter, and no adapter is active.
    #[error("no adapter is active: activate one, or name the adapter or the base; resident: {resident:?}")]
    NoActive {
        /// Names that could be activated.
        resident: Vec<String>,
    },

    /// No slot has this number, or the one that has it is vacant.
    #[error("slot {slot} holds no adapter; there are slots 0 to {}", .slots.saturating_sub(1))]
    UnknownSlot {
        /// The number asked for.
        slot: i64,
        /// `max_loras`.
        slots: usize,
    },

    /// Rows in flight use the slot, so it can't be overwritten now.
    #[error("slot {slot} ({name:?}) is in use by {refs} sequences")]
    SlotBusy {
        /// The slot.
        slot: usize,
        /// Its adapter.
        name: String,
        /// How many leases it has.
        refs: usize,
    },

    /// The slot's adapter replaces token rows, and it is not known yet which: without them its answers would be wrong.
    #[error(
        "slot {slot} ({name:?}) replaces token rows that wait for the served tables (LoraWeights::set_served_tables)"
    )]
    OverlayPending {
        /// The slot.
        slot: usize,
        /// Its adapter.
        name: String,
    },

    /// Every slot that may be evicted is in use.
    #[error("no free slot: {slots} slots, {pinned} pinned, the rest in use")]
    PoolFull {
        /// `max_loras`.
        slots: usize,
        /// How many are never evicted.
        pinned: usize,
    },

    /// Bytes on the device are not those that were sent. Nothing was published.
    #[error("byte {offset} of the staged adapter is {found:#04x} on the device, expected {expected:#04x}")]
    Corrupt {
        /// Offset in the slot's image.
        offset: u64,
        /// What the device has.
        found: u8,
        /// What was sent.
        expected: u8,
    },

    /// A wait passed its limit. Nothing was changed; the same call may succeed later.
    #[error("waited {waited:?} for {what}; in use: {}", Holder::list(holders))]
    TimedOut {
        /// What didn't come.
        what: &'static str,
        /// The limit.
        waited: std::time::Duration,
        /// Who holds slots now.
        holders: Vec<Holder>,
    },

    /// An adapter could not be loaded; all who waited for it get the same cause.
    #[error("adapter {name:?}: {source}")]
    Load {
        /// The adapter.
        name: String,
        /// Why not.
        source: std::sync::Arc<Error>,
    },

    /// A name from a request that would lead out of the adapters' root. Nothing was opened.
    #[error("adapter name {name:?} is refused: {why}")]
    Escape {
        /// The name, or its beginning.
        name: String,
        /// The rule it breaks.
        why: &'static str,
    },

    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },

    /// An input of the command or of `apply` is not what its documentation asks for.
    #[error("{0}")]
    Input(String),
}

/// A slot in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The slot.
    pub slot: u32,
    /// Its adapter.
    pub name: String,
    /// Leases on it.
    pub refs: u32,
}

impl Holder {
    fn list(holders: &[Holder]) -> String {
        let one = |h: &Holder| format!("slot {} ({:?}, {} leases)", h.slot, h.name, h.refs);
        if holders.is_empty() { "nothing".to_owned() } else { holders.iter().map(one).collect::<Vec<_>>().join(", ") }
    }
}

impl Error {
    /// A stable code for scripts; a [`Reject`]'s own code where the loader refused an adapter.
    pub fn code(&self) -> &'static str {
        match self {
            Error::Reject(reject) => reject.code.as_str(),
            Error::Unavailable { .. } => "E_UNAVAILABLE",
            Error::Driver { .. } => "E_DRIVER",
            Error::OutOfMemory { .. } => "E_OUT_OF_MEMORY",
            Error::Limit { .. } => "E_LIMIT",
            Error::Overflow { .. } => "E_OVERFLOW",
            Error::OutOfBounds { .. } => "E_OUT_OF_BOUNDS",
            Error::Shape { .. } => "E_SHAPE",
            Error::UnknownAdapter { .. } => "E_UNKNOWN_ADAPTER",
            Error::NoActive { .. } => "E_NO_ACTIVE",
            Error::UnknownSlot { .. } => "E_UNKNOWN_SLOT",
            Error::SlotBusy { .. } => "E_SLOT_BUSY",
            Error::OverlayPending { .. } => "E_OVERLAY_PENDING",
            Error::PoolFull { .. } => "E_POOL_FULL",
            Error::Corrupt { .. } => "E_CORRUPT",
            Error::TimedOut { .. } => "E_TIMED_OUT",
            Error::Load { source, .. } => source.code(),
            Error::Escape { .. } => "E_PATH_ESCAPE",
            Error::Io { .. } => "E_IO",
            Error::Input(_) => "E_INPUT",
        }
    }

    /// A [`Error::Shape`] from anything that can be displayed.
    pub fn shape(what: impl Into<String>, found: impl ToString, expected: impl ToString) -> Self {
        Error::Shape { what: what.into(), found: found.to_string(), expected: expected.to_string() }
    }
}
