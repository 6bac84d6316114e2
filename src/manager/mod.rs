//! Adapters as a server sees them: by name, in slots, in use or idle.
//!
//! [`LoraWeights`] is the loaded set itself: the pool, its tables, what each slot holds.
//! [`AdapterManager`] is what a server holds: it loads by name, hands out leases, and swaps between steps.

mod cache;
mod change;
mod flight;
mod lane;
mod layers;
mod lease;
mod load;
#[allow(clippy::module_inception)]
mod manager;
mod overlay;
mod refs;
mod select;
mod slot;
mod source;
mod status;
mod step;
mod sync;
mod weights;

pub use layers::{DenseWeight, LoraLayerWeights, LoraPair, LoraTokenRows};
pub use lease::Lease;
pub use load::LoraAdapterInput;
pub use manager::AdapterManager;
pub use overlay::{DeviceTables, OverlayRawSlot};
pub use select::{VictimError, select_victim_slot};
pub use slot::{AdapterSlot, SlotRef, SlotView};
pub use source::{Options, Source};
pub use status::{Resident, Status};
pub use step::Step;
pub use weights::LoraWeights;
