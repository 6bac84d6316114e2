//! From an adapter's files to host weights, with nothing ignored: no GPU here, no unsafe.

mod alpha;
mod audit;
mod base;
mod config;
mod confine;
mod family;
mod file;
mod float;
mod fused;
mod header;
mod json;
mod judge;
mod keys;
mod load;
mod pattern;
mod pickle;
mod reading;
mod reject;
mod resolve;
mod site;
mod source;
mod stack;
mod suspect;
mod targets;
mod weights;

pub use audit::{Audit, AuditSite, TensorCounts, Verdict, audit};
pub use base::{BaseModel, Linear};
pub use config::{PeftAdapterConfig, Scales, Targets, TokenIndices};
pub use confine::confine;
pub use header::{Header as TensorFile, TensorInfo};
pub use load::{load, pickled};
pub use pattern::PatternError;
pub use pickle::StateDict;
pub use reject::{Code, Reject};
pub use site::{LoraModule, SiteId};
pub use weights::{Adapter, Fate, HostMatrix, HostPair, HostTensor, Notice, TensorFate};
