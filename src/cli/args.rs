//! Arguments that several commands take.

use std::sync::Arc;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use lorapool::DType;
use lorapool::backend::{GpuBackend, best, open};

use super::failure::Failure;

/// What `--backend` takes: also names that this build was made without, which then say so.
const BACKENDS: [&str; 5] = ["auto", "cpu", "cuda", "vulkan", "webgpu"];

/// Which device to use.
#[derive(Debug, Args)]
pub struct DeviceArgs {
    /// Backend to run on; `auto` takes the best device present
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = BACKENDS)]
    pub backend: String,

    /// Which of the backend's devices, counted from 0 as `lorapool devices` lists them
    #[arg(long, value_name = "INDEX")]
    pub device: Option<usize>,
}

impl DeviceArgs {
    /// Opens the device.
    pub fn open(&self) -> Result<Arc<dyn GpuBackend>, Failure> {
        let backend = match (self.backend.as_str(), self.device) {
            ("auto", None) => best()?,
            ("auto", Some(_)) => {
                return Err(Failure::usage("--device counts the devices of one backend: add --backend"));
            }
            (name, index) => open(name, index.unwrap_or(0))?,
        };
        let caps = backend.caps();
        tracing::info!(backend = caps.backend, device = caps.device, driver = caps.driver, api = caps.api, "opened");
        Ok(backend)
    }
}

/// Parses `f32`, `f16`, `bf16`.
pub fn dtype() -> impl TypedValueParser<Value = DType> {
    PossibleValuesParser::new(DType::ALL.map(DType::name)).map(|name| {
        // The parser above lets no other name through.
        DType::ALL.into_iter().find(|dtype| dtype.name() == name).unwrap_or(DType::F32)
    })
}
