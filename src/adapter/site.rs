//! Sites: the linears of a model that an adapter may adapt.

use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

/// Which linear of a layer. The usual ones have names; any other is known by its path in the layer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LoraModule {
    /// `q_proj`
    QProj,
    /// `k_proj`
    KProj,
    /// `v_proj`
    VProj,
    /// `o_proj`
    OProj,
    /// `qkv_proj`: q, k and v in one linear.
    QkvProj,
    /// `gate_proj`
    GateProj,
    /// `up_proj`
    UpProj,
    /// `gate_up_proj`: gate and up in one linear.
    GateUpProj,
    /// `down_proj`
    DownProj,
    /// `out_proj` of a linear-attention layer.
    OutProj,
    /// Any other linear: its path after the layer index (`attention.output.dense`), or its whole path
    /// outside of layers, with `*` for the index where another stack has a module of the same name.
    Other(Arc<str>),
}

impl fmt::Display for LoraModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LoraModule::QProj => "q_proj",
            LoraModule::KProj => "k_proj",
            LoraModule::VProj => "v_proj",
            LoraModule::OProj => "o_proj",
            LoraModule::QkvProj => "qkv_proj",
            LoraModule::GateProj => "gate_proj",
            LoraModule::UpProj => "up_proj",
            LoraModule::GateUpProj => "gate_up_proj",
            LoraModule::DownProj => "down_proj",
            LoraModule::OutProj => "out_proj",
            LoraModule::Other(path) => path,
        })
    }
}

impl Serialize for LoraModule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A site: global layer index, module, and the base's own module path that the two stand for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct SiteId {
    /// Global layer index; 0 for a module outside of layers.
    pub layer: usize,
    /// Which linear of the layer.
    pub module: LoraModule,
    /// The base's module path: `model.layers.0.self_attn.q_proj`.
    #[serde(rename = "site")]
    pub path: Arc<str>,
}
