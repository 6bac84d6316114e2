//! How each kernel is written for which devices, and which of that a device runs.

use super::sm90::{self, Room};
use crate::contract::{Kernel, MAX_RANK, Spec, THREADS};
use crate::dtype::DType;

/// The PTX of all types of one kernel, made by `kernels-cuda/build`.
const fn ptx(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::BgmvShrink => include_str!("../../../kernels-cuda/ptx/bgmv_shrink.ptx"),
        Kernel::BgmvExpand => include_str!("../../../kernels-cuda/ptx/bgmv_expand.ptx"),
        Kernel::SgmvShrink => include_str!("../../../kernels-cuda/ptx/sgmv_shrink.ptx"),
        Kernel::SgmvExpand => include_str!("../../../kernels-cuda/ptx/sgmv_expand.ptx"),
        Kernel::EmbedShrink => include_str!("../../../kernels-cuda/ptx/embed_shrink.ptx"),
        Kernel::OverlayEmbed => include_str!("../../../kernels-cuda/ptx/overlay_embed.ptx"),
        Kernel::OverlayLogits => include_str!("../../../kernels-cuda/ptx/overlay_logits.ptx"),
        Kernel::ExpertRows => include_str!("../../../kernels-cuda/ptx/expert_rows.ptx"),
    }
}

/// The PTX of [`Variant::Sm90`], made by the same; of a kernel without that variant, the plain one.
const fn sm90_ptx(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::EmbedShrink | Kernel::OverlayEmbed | Kernel::OverlayLogits => ptx(kernel),
        Kernel::BgmvShrink => include_str!("../../../kernels-cuda/ptx/bgmv_shrink_sm90.ptx"),
        Kernel::BgmvExpand => include_str!("../../../kernels-cuda/ptx/bgmv_expand_sm90.ptx"),
        Kernel::SgmvShrink => include_str!("../../../kernels-cuda/ptx/sgmv_shrink_sm90.ptx"),
        Kernel::SgmvExpand => include_str!("../../../kernels-cuda/ptx/sgmv_expand_sm90.ptx"),
        Kernel::ExpertRows => ptx(kernel),
    }
}

/// How a kernel is written. Chosen by device and types ([`MEASURED`]) and by whether decode has scratch for sums in parts
/// ([`Function::serves`](super::module::Function::serves)), so a row's bits are the same in every launch of its op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Variant {
    /// As the contract lays out its workgroups: any device, any types.
    Plain,
    /// With tensor cores, clusters and early launches ([`sm90`]): bf16 and f16 from compute capability 9.0 on.
    Sm90,
}

/// Where a variant serves.
struct Measured {
    /// Compute capabilities from this one on.
    since: (i32, i32),
    spec: Spec,
    variant: Variant,
}

const BF16: Spec = Spec { act: DType::Bf16, weight: DType::Bf16 };
const F16: Spec = Spec { act: DType::F16, weight: DType::F16 };

/// Variants that were measured to be worth it; what no entry names runs the plain one. `lorapool bench --tune` measures
/// again. The figures are in `benches/results/`: on an H200 the kernels for 9.0 take from a tenth (prefill) to half (64 rows with an
/// adapter each) of the plain ones' time.
const MEASURED: &[Measured] = &[
    Measured { since: (9, 0), spec: BF16, variant: Variant::Sm90 },
    Measured { since: (9, 0), spec: F16, variant: Variant::Sm90 },
];

impl Variant {
    /// All, the plainest first.
    pub(super) const ALL: [Variant; 2] = [Variant::Plain, Variant::Sm90];

    /// `plain` or `sm90`.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Variant::Plain => "plain",
            Variant::Sm90 => "sm90",
        }
    }

    /// The compute capability that it needs.
    pub(super) const fn needs(self) -> (i32, i32) {
        match self {
            Variant::Plain => (7, 0),
            Variant::Sm90 => (9, 0),
        }
    }

    /// What `kernel` runs in on a device of `capability`.
    pub(super) fn of(capability: (i32, i32), kernel: Kernel, spec: Spec) -> Self {
        let entry = MEASURED.iter().find(|entry| capability >= entry.since && entry.spec == spec && kernel.is_pair());
        entry.map_or(Self::Plain, |entry| entry.variant)
    }

    /// Its PTX.
    pub(super) fn ptx(self, kernel: Kernel) -> &'static str {
        match self {
            Self::Sm90 => sm90_ptx(kernel),
            Self::Plain => ptx(kernel),
        }
    }

    /// Percentage of a multiprocessor's memory that its blocks are to share, if it matters.
    pub(super) fn carveout(self, kernel: Kernel) -> Option<i32> {
        (self == Self::Sm90).then(|| sm90::carveout(kernel)).flatten()
    }

    /// Most threads of a block, and most bytes of shared memory that it asks for.
    pub(super) fn block(self, kernel: Kernel, room: Room) -> (u32, u32) {
        match self {
            // With more ranks a block has fewer warps, with more memory for each.
            Self::Sm90 => {
                let blocks = (1..=MAX_RANK).map(|rank| sm90::block(kernel, rank, room));
                blocks.fold((0, 0), |most, block| (most.0.max(block.0), most.1.max(block.1)))
            }
            Self::Plain => (THREADS, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::module::entry;
    use super::*;
    use crate::contract::Params;

    #[test]
    fn the_ptx_has_an_entry_for_every_kernel_and_type_with_the_contract_s_arguments() {
        for (kernel, capability) in Kernel::ALL.into_iter().flat_map(|k| [(k, (7, 0)), (k, (9, 0))]) {
            for act in DType::ALL {
                for weight in DType::ALL {
                    let spec = Spec { act, weight };
                    let name = entry(kernel, spec);
                    let text = Variant::of(capability, kernel, spec).ptx(kernel);
                    let (_, declaration) = text.split_once(&format!(".visible .entry {name}(")).expect("no such entry");
                    let (arguments, _) = declaration.split_once(')').expect("no end of its arguments");
                    let arguments: Vec<_> = arguments.split(',').map(str::trim).collect();
                    let (params, addresses) = arguments.split_last().expect("no arguments");
                    assert_eq!(addresses.len(), kernel.operands().len(), "{name}");
                    assert!(addresses.iter().all(|a| a.contains(".u64")), "{name}: {addresses:?}");
                    let block = format!("{name}_param_{}[{}]", addresses.len(), size_of::<Params>());
                    assert!(params.ends_with(&block), "{name}: {params}");
                }
            }
        }
    }

    #[test]
    fn the_ptx_is_of_an_isa_that_drivers_of_cuda_12_0_load() {
        for kernel in Kernel::ALL {
            assert!(ptx(kernel).contains("\n.version 8.0\n.target sm_70\n"), "{}", kernel.name());
            let target = if kernel.is_pair() { "sm_90" } else { "sm_70" };
            assert!(sm90_ptx(kernel).contains(&format!("\n.version 8.0\n.target {target}\n")), "{}", kernel.name());
        }
    }

    #[test]
    fn no_entry_of_the_table_names_a_variant_that_its_devices_lack() {
        assert!(MEASURED.iter().all(|entry| entry.since >= entry.variant.needs()));
    }
}
