//! The WGSL kernels, put together as the WebGPU backend does: valid without any optional feature, for
//! both WGSL compilers, and within WebGPU's default limits.
#![cfg(feature = "webgpu")]

use std::process::Command;

use lorapool::backend::webgpu::source;
use lorapool::contract::{Access, Kernel, MAX_OPERANDS, THREADS};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Module, StorageAccess};

/// A kernel through naga, with no capability beyond WebGPU's core.
fn validated(kernel: Kernel) -> (Module, ModuleInfo) {
    let text = source(kernel);
    let module = naga::front::wgsl::parse_str(&text)
        .unwrap_or_else(|error| panic!("{}: {}", kernel.name(), error.emit_to_string(&text)));
    let info = Validator::new(ValidationFlags::all(), Capabilities::empty())
        .validate(&module)
        .unwrap_or_else(|error| panic!("{}: {}", kernel.name(), error.emit_to_string(&text)));
    (module, info)
}

#[test]
fn naga_accepts_every_kernel_without_an_optional_feature() {
    for kernel in Kernel::ALL {
        let (module, _) = validated(kernel);
        assert_eq!(module.entry_points.len(), 1, "{}", kernel.name());
        assert_eq!(module.entry_points[0].name, kernel.name());
        assert_eq!(module.entry_points[0].workgroup_size, [THREADS, 1, 1], "{}", kernel.name());
    }
}

#[test]
fn storage_bindings_are_the_contracts_operands_in_order() {
    for kernel in Kernel::ALL {
        let (module, info) = validated(kernel);
        let usage = info.get_entry_point(0);
        let mut found: Vec<_> = module
            .global_variables
            .iter()
            .filter(|(handle, _)| !usage[*handle].is_empty())
            .filter_map(|(_, variable)| match variable.space {
                AddressSpace::Storage { access } => {
                    let at = variable.binding.expect("a storage variable has a binding");
                    let written = access.contains(StorageAccess::STORE);
                    Some((at.group, at.binding, variable.name.clone().unwrap_or_default(), written))
                }
                _ => None,
            })
            .collect();
        found.sort();
        let expected: Vec<_> = (0..)
            .zip(kernel.operands())
            .map(|(i, operand)| (0, i, operand.name.to_owned(), operand.access == Access::Write))
            .collect();
        assert_eq!(found, expected, "{}", kernel.name());
        assert!(found.len() <= MAX_OPERANDS && MAX_OPERANDS <= 8, "WebGPU's default limit is 8");
    }
}

#[test]
fn workgroup_memory_is_within_what_the_backend_asks_for() {
    let mut largest = 0;
    for kernel in Kernel::ALL {
        let (module, info) = validated(kernel);
        let mut layouter = naga::proc::Layouter::default();
        layouter.update(module.to_ctx()).expect("a valid module has a layout");
        let usage = info.get_entry_point(0);
        let bytes: u32 = module
            .global_variables
            .iter()
            .filter(|(handle, variable)| variable.space == AddressSpace::WorkGroup && !usage[*handle].is_empty())
            // The limit counts each variable rounded up to 16 bytes.
            .map(|(_, variable)| layouter[variable.ty].size.next_multiple_of(16))
            .sum();
        assert!(bytes <= 16 << 10, "{} takes {bytes} bytes of workgroup memory", kernel.name());
        largest = largest.max(bytes);
    }
    assert_eq!(largest, lorapool::backend::webgpu::WORKGROUP_BYTES);
}

/// Chrome's compiler is stricter than naga: it refuses a barrier in control flow that it can't prove uniform.
#[test]
fn tint_accepts_every_kernel_where_it_is_installed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for kernel in Kernel::ALL {
        let path = folder.path().join(kernel.name()).with_extension("wgsl");
        std::fs::write(&path, source(kernel)).expect("a written kernel");
        let Ok(output) = Command::new("tint").arg(&path).args(["--format", "wgsl"]).output() else {
            eprintln!("skipped: tint is not on the path");
            return;
        };
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {message}", kernel.name());
    }
}
