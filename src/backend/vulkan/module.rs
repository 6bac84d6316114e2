//! Kernels of one device: the committed SPIR-V, specialised on dtypes.

#![allow(unsafe_code)]

use std::sync::Arc;

use ash::vk;

use super::queue::Shared;
use super::{driver, lock};
use crate::backend::Pipeline;
use crate::contract::{Kernel, Spec};
use crate::error::{Error, Result};

/// SPIR-V as the bytes of its file, aligned for reading as words.
#[repr(C, align(4))]
struct Aligned<T: ?Sized>(T);

macro_rules! spirv {
    ($name:literal) => {{
        static CODE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!("../../../kernels-spirv/", $name, ".spv")));
        &CODE.0
    }};
}

/// The committed module of `kernel`, 4-byte aligned.
fn spirv(kernel: Kernel) -> &'static [u8] {
    match kernel {
        Kernel::BgmvShrink => spirv!("bgmv_shrink"),
        Kernel::BgmvExpand => spirv!("bgmv_expand"),
        Kernel::SgmvShrink => spirv!("sgmv_shrink"),
        Kernel::SgmvExpand => spirv!("sgmv_expand"),
        Kernel::EmbedShrink => spirv!("embed_shrink"),
        Kernel::OverlayEmbed => spirv!("overlay_embed"),
        Kernel::OverlayLogits => spirv!("overlay_logits"),
        Kernel::ExpertRows => spirv!("expert_rows"),
        Kernel::ExpertTiles => spirv!("expert_tiles"),
    }
}

/// A pipeline of one device; the device owns it and destroys it last.
pub(super) struct Loaded {
    raw: vk::Pipeline,
    shared: Arc<Shared>,
}

impl Loaded {
    /// The pipeline behind `pipeline`, if it is one of `shared`'s.
    pub(super) fn of(pipeline: &Pipeline, shared: &Arc<Shared>) -> Result<vk::Pipeline> {
        match pipeline.inner::<Loaded>() {
            Some(loaded) if Arc::ptr_eq(&loaded.shared, shared) => Ok(loaded.raw),
            _ => Err(Error::shape(
                format!("pipeline {pipeline:?}"),
                "one of another device",
                format!("one loaded on {}", shared.caps.device),
            )),
        }
    }
}

/// Compiles a kernel, or finds it compiled.
pub(super) fn load(shared: &Arc<Shared>, kernel: Kernel, spec: Spec) -> Result<Pipeline> {
    let mut pipelines = lock(&shared.pipelines);
    let raw = match pipelines.get(&(kernel, spec)) {
        Some(raw) => *raw,
        None => {
            let raw = compile(shared, kernel, spec)?;
            pipelines.insert((kernel, spec), raw);
            raw
        }
    };
    Ok(Pipeline::new(kernel, spec, Arc::new(Loaded { raw, shared: shared.clone() })))
}

fn compile(shared: &Shared, kernel: Kernel, spec: Spec) -> Result<vk::Pipeline> {
    let device = &shared.device.raw;
    let words: &[u32] = bytemuck::cast_slice(spirv(kernel));
    let info = vk::ShaderModuleCreateInfo::default().code(words);
    // SAFETY: the module is valid SPIR-V 1.5 (checked by spirv-val in the tests) that needs only
    // bufferDeviceAddress, which is enabled.
    let module = unsafe { device.create_shader_module(&info, None) }.map_err(driver("vkCreateShaderModule"))?;
    // constant_id 0 and 1 of common.glsl.
    let entries = [0, 1].map(|id| vk::SpecializationMapEntry { constant_id: id, offset: id * 4, size: 4 });
    let values = [spec.act as u32, spec.weight as u32];
    let specialization = vk::SpecializationInfo::default().map_entries(&entries).data(bytemuck::cast_slice(&values));
    let stage = vk::PipelineShaderStageCreateInfo::default()
        .stage(vk::ShaderStageFlags::COMPUTE)
        .module(module)
        .name(c"main")
        .specialization_info(&specialization);
    let infos = [vk::ComputePipelineCreateInfo::default().stage(stage).layout(shared.layout)];
    // SAFETY: module and layout belong to this device; the layout has the module's push constant.
    let made = unsafe { device.create_compute_pipelines(vk::PipelineCache::null(), &infos, None) };
    // SAFETY: pipelines don't need their module once they are made.
    unsafe { device.destroy_shader_module(module, None) };
    match made {
        Ok(pipelines) => Ok(pipelines[0]),
        Err((_, error)) => Err(driver("vkCreateComputePipelines")(error)),
    }
}
