//! What a device can do, as data.

use serde::Serialize;

/// What kind of hardware runs the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceClass {
    /// A GPU with its own memory.
    Discrete,
    /// A GPU that shares the host's memory.
    Integrated,
    /// A GPU handed through by a hypervisor, or one that doesn't say.
    Other,
    /// The CPU itself: this crate's own backend.
    Cpu,
    /// A GPU driver that computes on the CPU. For tests.
    Software,
}

/// How a pool orders its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WeightLayout {
    /// Slot after slot: a slot is one contiguous transfer. For devices with addresses.
    SlotMajor,
    /// `[site][slot]` planes: a launch binds the planes of its sites only. For devices with bindings.
    SiteMajor,
}

/// Capabilities of a device. Code above the backends decides by these, never by a backend's name.
#[derive(Clone, Debug, Serialize)]
pub struct Caps {
    /// `cpu`, `cuda`, `vulkan` or `webgpu`: for people.
    pub backend: &'static str,
    /// The device's own name.
    pub device: String,
    /// Driver name and version.
    pub driver: String,
    /// API version or compute capability: `Vulkan 1.3.230`, `sm_90`.
    pub api: String,
    /// What kind of hardware it is.
    pub class: DeviceClass,
    /// Bytes of device memory, 0 where the API doesn't say.
    pub memory: u64,
    /// How a pool orders its bytes here.
    pub layout: WeightLayout,
    /// Largest allocation in bytes.
    pub max_alloc: u64,
    /// Largest operand of a launch in bytes; `u64::MAX` where operands are addresses.
    pub max_binding: u64,
    /// Operands start at multiples of this many bytes, or cost a part of `max_binding` equal to the remainder.
    pub binding_align: u64,
    /// Largest number of workgroups in x and y.
    pub max_groups: [u32; 2],
    /// Smallest and largest number of lanes in a subgroup; kernels must not assume one.
    pub subgroup: [u32; 2],
    /// Parts that decode kernels leave a sum over columns in, and scratch needs room for; 0: they leave none.
    pub z_parts: u32,
}
