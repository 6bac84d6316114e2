//! Where adapters come from, and how a manager waits and checks.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::adapter::{Adapter, BaseModel};

/// Where an adapter's bytes come from when it is needed.
#[derive(Clone, Debug)]
pub enum Source {
    /// A PEFT directory, read anew on each load but where [`Options::host_cache`] has what its files, by length
    /// and time of change, still hold.
    Dir(PathBuf),
    /// PEFT directories, read as one is, and weights: the sum of their deltas, as
    /// [`load_merged`](crate::adapter::load_merged) makes it.
    Merged(Vec<(PathBuf, f32)>),
    /// Host memory.
    Memory(Arc<Adapter>),
}

/// How a manager waits and checks.
#[derive(Clone, Debug)]
pub struct Options {
    /// Longest wait of a call: for its turn, for a slot, for a step to end, for users to leave.
    pub wait: Duration,
    /// Whether staged bytes are read back and compared before they are published.
    pub verify: bool,
    /// Bytes of page-locked host memory for adapters that were resident: they come back to a slot at the speed of
    /// the device's link. 0: none are kept.
    pub host_cache: u64,
    /// The base model that adapters from disk are checked against.
    pub base: Option<Arc<BaseModel>>,
    /// A folder of adapters: a name that is not registered is looked for there, and nowhere else.
    pub root: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self { wait: Duration::from_secs(30), verify: true, host_cache: 0, base: None, root: None }
    }
}
