//! From an adapter's files to host weights, with nothing ignored: no GPU here, no unsafe.

mod reject;
mod site;
mod weights;

pub use reject::{Code, Reject};
pub use site::{LoraModule, SiteId};
pub use weights::{Adapter, HostMatrix, HostPair, Notice};
