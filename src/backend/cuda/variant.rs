//! How each kernel is written for which devices, and which of that a device runs.

use super::sm90::{self, Room};
use super::{routed, sm90a};
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
        Kernel::ExpertTiles => include_str!("../../../kernels-cuda/ptx/expert_tiles.ptx"),
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
        Kernel::ExpertRows => include_str!("../../../kernels-cuda/ptx/expert_rows_sm90.ptx"),
        Kernel::ExpertTiles => include_str!("../../../kernels-cuda/ptx/expert_tiles_sm90.ptx"),
    }
}

/// The PTX of [`Variant::Sm90a`], made by the same, of kernels with that variant.
const fn sm90a_ptx(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::SgmvShrink => include_str!("../../../kernels-cuda/ptx/sgmv_shrink_sm90a.ptx"),
        Kernel::SgmvExpand => include_str!("../../../kernels-cuda/ptx/sgmv_expand_sm90a.ptx"),
        _ => sm90_ptx(kernel),
    }
}

/// The PTX of [`Variant::Routed`], made by the same, of kernels with that variant.
const fn routed_ptx(kernel: Kernel) -> &'static str {
    match kernel {
        Kernel::SgmvShrink => include_str!("../../../kernels-cuda/ptx/sgmv_shrink_routed.ptx"),
        _ => sm90_ptx(kernel),
    }
}

/// How a kernel is written. Chosen by device and types ([`MEASURED`]), by whether decode has scratch for sums in parts, and by ranks
/// between variants of the same bits ([`Function::serves`](super::module::Function::serves)): so a row's bits are the same in every
/// launch of its op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Variant {
    /// As the contract lays out its workgroups: any device, any types.
    Plain,
    /// With tensor cores, clusters and early launches ([`sm90`]): bf16 and f16 from compute capability 9.0 on.
    Sm90,
    /// With products of warpgroups ([`sm90a`]): prefill of many ranks, beside [`Variant::Sm90`], on 9.0 and no other.
    Sm90a,
    /// For the many short segments of routed layers ([`routed`]), from 9.0 on.
    Routed,
}

/// Where a variant serves.
struct Measured {
    spec: Spec,
    kernels: &'static [Kernel],
    variant: Variant,
}

const BF16: Spec = Spec { act: DType::Bf16, weight: DType::Bf16 };
const F16: Spec = Spec { act: DType::F16, weight: DType::F16 };
const PAIRS: &[Kernel] = &[Kernel::BgmvShrink, Kernel::BgmvExpand, Kernel::SgmvShrink, Kernel::SgmvExpand];
const ROUTING: &[Kernel] = &[Kernel::ExpertRows, Kernel::ExpertTiles];
const PREFILL: &[Kernel] = &[Kernel::SgmvShrink, Kernel::SgmvExpand];

/// Variants that were measured to be worth it, wherever they run; what no entry names runs the plain one. `lorapool bench --tune`
/// measures again. The figures are in `benches/results/`: on an H200 the kernels for 9.0 take from a tenth (prefill) to half (64 rows
/// with an adapter each) of the plain ones' time, those for 9.0 alone three quarters of that at rank 64, the one for routed layers a third
/// of a prefill step of experts.
const MEASURED: &[Measured] = &[
    Measured { spec: BF16, kernels: PAIRS, variant: Variant::Sm90 },
    Measured { spec: F16, kernels: PAIRS, variant: Variant::Sm90 },
    Measured { spec: BF16, kernels: ROUTING, variant: Variant::Sm90 },
    Measured { spec: F16, kernels: ROUTING, variant: Variant::Sm90 },
    Measured { spec: BF16, kernels: PREFILL, variant: Variant::Sm90a },
    Measured { spec: F16, kernels: &[Kernel::SgmvShrink], variant: Variant::Sm90a },
    Measured { spec: BF16, kernels: &[Kernel::SgmvShrink], variant: Variant::Routed },
    Measured { spec: F16, kernels: &[Kernel::SgmvShrink], variant: Variant::Routed },
];

impl Variant {
    /// All, the plainest first.
    pub(super) const ALL: [Variant; 4] = [Variant::Plain, Variant::Sm90, Variant::Sm90a, Variant::Routed];

    /// `plain`, `sm90`, `sm90a` or `routed`.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Variant::Plain => "plain",
            Variant::Sm90 => "sm90",
            Variant::Sm90a => "sm90a",
            Variant::Routed => "routed",
        }
    }

    /// Whether devices of that compute capability run it.
    pub(super) fn runs_on(self, capability: (i32, i32)) -> bool {
        match self {
            Variant::Plain => capability >= (7, 0),
            Variant::Sm90 | Variant::Routed => capability >= (9, 0),
            Variant::Sm90a => capability == (9, 0),
        }
    }

    /// Whether `kernel` is to run in it on a device of `capability`, perhaps beside plainer ones.
    pub(super) fn serves(self, capability: (i32, i32), kernel: Kernel, spec: Spec) -> bool {
        let named = |entry: &Measured| entry.variant == self && entry.spec == spec && entry.kernels.contains(&kernel);
        self.runs_on(capability) && (self == Self::Plain || MEASURED.iter().any(named))
    }

    /// Its PTX.
    pub(super) fn ptx(self, kernel: Kernel) -> &'static str {
        match self {
            Self::Routed => routed_ptx(kernel),
            Self::Sm90a => sm90a_ptx(kernel),
            Self::Sm90 => sm90_ptx(kernel),
            Self::Plain => ptx(kernel),
        }
    }

    /// Percentage of a multiprocessor's memory that its blocks are to share, if it matters.
    pub(super) fn carveout(self, kernel: Kernel) -> Option<i32> {
        (self != Self::Plain).then(|| sm90::carveout(kernel)).flatten()
    }

    /// Most threads of a block, and most bytes of shared memory that it asks for.
    pub(super) fn block(self, kernel: Kernel, room: Room) -> (u32, u32) {
        // With more ranks a block may have fewer warps, with more memory for each.
        let blocks = (1..=MAX_RANK).map(|rank| match self {
            Self::Routed => routed::block(),
            Self::Sm90a => sm90a::block(kernel, rank),
            Self::Sm90 => sm90::block(kernel, rank, room),
            Self::Plain => (THREADS, 0),
        });
        blocks.fold((0, 0), |most, block| (most.0.max(block.0), most.1.max(block.1)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::module::entry;
    use super::*;
    use crate::contract::Params;

    #[test]
    fn the_ptx_has_an_entry_for_every_kernel_and_type_with_the_contract_s_arguments() {
        let specs = DType::ALL.into_iter().flat_map(|act| DType::ALL.map(|weight| Spec { act, weight }));
        for (spec, kernel) in specs.flat_map(|spec| Kernel::ALL.map(|kernel| (spec, kernel))) {
            let name = entry(kernel, spec);
            let serving = Variant::ALL.into_iter().filter(|variant| variant.serves((9, 0), kernel, spec));
            for variant in serving {
                let text = variant.ptx(kernel);
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

    #[test]
    fn the_ptx_is_of_an_isa_that_drivers_of_cuda_12_0_load() {
        let made_for = |text: &str, target| text.contains(&format!("\n.version 8.0\n.target {target}\n"));
        for kernel in Kernel::ALL {
            assert!(made_for(ptx(kernel), "sm_70"), "{}", kernel.name());
            let target = if kernel.is_tokens() { "sm_70" } else { "sm_90" };
            assert!(made_for(sm90_ptx(kernel), target), "{}", kernel.name());
        }
        assert!(PREFILL.iter().all(|kernel| made_for(sm90a_ptx(*kernel), "sm_90a")));
        assert!(made_for(routed_ptx(Kernel::SgmvShrink), "sm_90"));
    }

    #[test]
    fn later_devices_run_the_kernels_for_9_0_but_not_those_for_9_0_alone() {
        let serving = |capability, kernel, spec| {
            let serves = |variant: &Variant| variant.serves(capability, kernel, spec);
            Variant::ALL.into_iter().filter(serves).map(Variant::name).collect::<Vec<_>>()
        };
        assert_eq!(serving((8, 9), Kernel::SgmvExpand, BF16), ["plain"]);
        assert_eq!(serving((9, 0), Kernel::SgmvExpand, BF16), ["plain", "sm90", "sm90a"]);
        assert_eq!(serving((9, 0), Kernel::SgmvExpand, F16), ["plain", "sm90"]);
        assert_eq!(serving((9, 0), Kernel::BgmvShrink, F16), ["plain", "sm90"]);
        assert_eq!(serving((10, 0), Kernel::SgmvShrink, F16), ["plain", "sm90", "routed"]);
        assert_eq!(serving((10, 0), Kernel::ExpertRows, BF16), ["plain", "sm90"]);
    }
}
