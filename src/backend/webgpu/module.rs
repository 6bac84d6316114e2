//! The kernels of one device: WGSL put together, layouts, pipelines.
//!
//! Shader modules are made with all of wgpu's run-time checks (bounds, loops, division): a browser has
//! them in any case, leaving them out is `unsafe`, and a table whose contents slip past the kernels' own
//! checks then still can't reach another buffer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Inner, scoped};
use crate::backend::Pipeline;
use crate::contract::render::Language;
use crate::contract::{Access, Kernel, Operand, Params, Spec};
use crate::error::Result;

/// Bytes of the uniform block, `Envelope` in the prelude: the parameters and an origin for each operand.
pub(super) const ENVELOPE: u64 = (size_of::<Params>() + crate::contract::MAX_OPERANDS * 4) as u64;

/// The WGSL of `kernel`, whole: prelude, envelope, helpers and operands of its half of an op, and its own text.
pub fn source(kernel: Kernel) -> String {
    macro_rules! text {
        ($name:literal) => {
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels-wgsl/", $name, ".wgsl"))
        };
    }
    debug_assert_eq!(Language::Wgsl.path(), "kernels-wgsl/contract.wgsl");
    let half: &[&str] = match kernel {
        Kernel::ExpertRows | Kernel::ExpertTiles => &[text!("routed")],
        Kernel::OverlayEmbed | Kernel::OverlayLogits => &[text!("common"), text!("overlay")],
        _ if kernel.is_expand() => &[text!("common"), text!("expand")],
        _ => &[text!("common"), text!("shrink")],
    };
    let own = match kernel {
        Kernel::BgmvShrink => text!("bgmv_shrink"),
        Kernel::BgmvExpand => text!("bgmv_expand"),
        Kernel::SgmvShrink => text!("sgmv_shrink"),
        Kernel::SgmvExpand => text!("sgmv_expand"),
        Kernel::EmbedShrink => text!("embed_shrink"),
        Kernel::OverlayEmbed => text!("overlay_embed"),
        Kernel::OverlayLogits => text!("overlay_logits"),
        Kernel::ExpertRows => text!("expert_rows"),
        Kernel::ExpertTiles => text!("expert_tiles"),
    };
    [&[text!("contract"), text!("envelope")], half, &[own]].concat().join("\n")
}

/// Bind group layouts and what has been compiled.
#[derive(Debug)]
pub(super) struct Modules {
    /// Group 0 of each list of operands, and pipeline layouts with it.
    layouts: Vec<(&'static [Operand], wgpu::BindGroupLayout, wgpu::PipelineLayout)>,
    /// Group 1: the envelope.
    pub(super) envelope: wgpu::BindGroupLayout,
    shaders: Mutex<HashMap<Kernel, wgpu::ShaderModule>>,
    pipelines: Mutex<HashMap<(Kernel, Spec), Pipeline>>,
}

/// A compiled kernel, as [`Pipeline::inner`] holds it.
#[derive(Debug)]
pub(super) struct Module {
    pub(super) pipeline: wgpu::ComputePipeline,
    /// The device, by address: a pipeline of another one is refused.
    pub(super) home: Arc<super::Bindings>,
}

impl Modules {
    pub(super) fn new(device: &wgpu::Device) -> Result<Self> {
        scoped(device, "create_bind_group_layout", || {
            let envelope = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: Some("lorapool envelope"),
                entries: &[wgpu::BindGroupLayoutEntry {
                    binding: 0,
                    visibility: wgpu::ShaderStages::COMPUTE,
                    ty: wgpu::BindingType::Buffer {
                        ty: wgpu::BufferBindingType::Uniform,
                        has_dynamic_offset: true,
                        min_binding_size: wgpu::BufferSize::new(ENVELOPE),
                    },
                    count: None,
                }],
            });
            let mut layouts: Vec<(&'static [Operand], _, _)> = Vec::new();
            for kernel in Kernel::ALL {
                if layouts.iter().any(|(known, ..)| *known == kernel.operands()) {
                    continue;
                }
                let operands = operand_layout(device, kernel);
                let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                    label: Some("lorapool kernel"),
                    bind_group_layouts: &[Some(&operands), Some(&envelope)],
                    immediate_size: 0,
                });
                layouts.push((kernel.operands(), operands, layout));
            }
            Self { envelope, layouts, shaders: Mutex::default(), pipelines: Mutex::default() }
        })
    }

    /// Group 0's layout for `kernel`, and the pipeline layout with it.
    fn layouts(&self, kernel: Kernel) -> (&wgpu::BindGroupLayout, &wgpu::PipelineLayout) {
        let found = self.layouts.iter().find(|(operands, ..)| *operands == kernel.operands());
        let (_, operands, layout) = found.expect("every kernel's operands have a layout");
        (operands, layout)
    }

    /// Group 0's layout for `kernel`.
    pub(super) fn operands(&self, kernel: Kernel) -> &wgpu::BindGroupLayout {
        self.layouts(kernel).0
    }
}

fn operand_layout(device: &wgpu::Device, kernel: Kernel) -> wgpu::BindGroupLayout {
    let entries: Vec<_> = (0..)
        .zip(kernel.operands())
        .map(|(binding, operand)| wgpu::BindGroupLayoutEntry {
            binding,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer {
                ty: wgpu::BufferBindingType::Storage { read_only: operand.access == Access::Read },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        })
        .collect();
    device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label: Some(kernel.name()), entries: &entries })
}

impl Inner {
    /// The compiled kernel; compiles at most once for each `(kernel, spec)`.
    pub(super) fn load(&self, kernel: Kernel, spec: Spec) -> Result<Pipeline> {
        let modules = &self.modules;
        // Held while compiling, so that two threads don't compile the same kernel.
        let mut pipelines = modules.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = pipelines.get(&(kernel, spec)) {
            return Ok(found.clone());
        }
        let device = &self.device;
        let found = modules.shaders.lock().unwrap_or_else(PoisonError::into_inner).get(&kernel).cloned();
        let shader = match found {
            Some(shader) => shader,
            None => {
                let shader = scoped(device, "create_shader_module", || {
                    device.create_shader_module(wgpu::ShaderModuleDescriptor {
                        label: Some(kernel.name()),
                        source: wgpu::ShaderSource::Wgsl(source(kernel).into()),
                    })
                })?;
                modules.shaders.lock().unwrap_or_else(PoisonError::into_inner).insert(kernel, shader.clone());
                shader
            }
        };
        let label = format!("{}[{spec}]", kernel.name());
        let pipeline = scoped(device, "create_compute_pipeline", || {
            device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(&label),
                layout: Some(modules.layouts(kernel).1),
                module: &shader,
                entry_point: Some(kernel.name()),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[("ACT", f64::from(spec.act as u32)), ("WEIGHT", f64::from(spec.weight as u32))],
                    // The kernels write every word of workgroup memory that they read.
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            })
        })?;
        let module = Module { pipeline, home: self.bindings.clone() };
        let pipeline = Pipeline::new(kernel, spec, Arc::new(module));
        pipelines.insert((kernel, spec), pipeline.clone());
        Ok(pipeline)
    }
}
