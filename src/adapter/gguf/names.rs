//! llama.cpp's names of tensors, by architecture, and what its converter does to their rows.
//!
//! Only architectures whose converter is known to leave the linears as they are, or to permute the rows of q and k and
//! nothing else. For rotary embeddings that pair neighbours, the converter takes the rows of each head, which transformers
//! keeps as two halves, in turn: row `2i + p` of a head is row `p * width / 2 + i` of the base's.

use super::super::base::BaseModel;
use super::super::header::TensorInfo;
use super::super::json::excerpt;
use super::super::reject::{Code, Loaded, Reject};
use super::key;

/// `general.architecture`, the base's `model_type`s that it stands for, and what is special.
struct Known {
    name: &'static str,
    model_types: &'static [&'static str],
    /// Whether the rows of q and k are permuted.
    permutes: bool,
    /// Linears whose names are not [`LINEARS`]'.
    own: &'static [(&'static str, &'static str)],
}

const fn plain(name: &'static str, model_types: &'static [&'static str]) -> Known {
    Known { name, model_types, permutes: false, own: &[] }
}

const fn permuted(name: &'static str, model_types: &'static [&'static str]) -> Known {
    Known { name, model_types, permutes: true, own: &[] }
}

const KNOWN: &[Known] = &[
    permuted("llama", &["llama", "mistral", "mixtral"]),
    permuted("mistral3", &["mistral", "ministral3"]),
    permuted("granite", &["granite"]),
    permuted("smollm3", &["smollm3"]),
    permuted("arcee", &["arcee"]),
    permuted("olmo", &["olmo"]),
    plain("qwen2", &["qwen2"]),
    plain("qwen3", &["qwen3"]),
    plain("qwen2moe", &["qwen2_moe"]),
    plain("qwen3moe", &["qwen3_moe"]),
    plain("exaone4", &["exaone4"]),
    plain("gemma", &["gemma"]),
    plain("gemma2", &["gemma2"]),
    plain("gemma3", &["gemma3", "gemma3_text"]),
    plain("command-r", &["cohere"]),
    plain("cohere2", &["cohere2"]),
    plain("olmo2", &["olmo2", "olmo3"]),
    plain("seed_oss", &["seed_oss"]),
    Known {
        name: "phi3",
        model_types: &["phi3"],
        permutes: false,
        own: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
    },
    Known {
        name: "starcoder2",
        model_types: &["starcoder2"],
        permutes: false,
        own: &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")],
    },
];

/// Linears of a layer, by llama.cpp's name and by transformers'.
const LINEARS: &[(&str, &str)] = &[
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// How a file of one architecture for one base is to be read.
pub(super) struct Architecture {
    known: &'static Known,
    heads: usize,
    key_value_heads: usize,
}

/// What a tensor is to PEFT.
#[derive(Debug)]
pub(super) struct Place {
    /// PEFT's key.
    pub key: String,
    /// What has to be done to its bytes.
    pub rewrite: Option<Rewrite>,
}

/// A change of a tensor's rows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Rewrite {
    /// Rows of this many heads are put back into halves.
    Heads(usize),
    /// Rows become columns.
    Transpose,
}

impl Architecture {
    /// The architecture that a file names, against the base it is given for.
    pub fn of(file: &str, name: &str, base: &BaseModel) -> Loaded<Self> {
        let Some(known) = KNOWN.iter().find(|known| known.name == name) else {
            let names: Vec<_> = KNOWN.iter().map(|known| known.name).collect();
            let message = format!(
                "{file}: general.architecture is {:?}; how llama.cpp's converter renames and reorders its tensors is not \
                 known here, expected one of {}; take the safetensors that the file was converted from",
                excerpt(name),
                names.join(", ")
            );
            return Err(Reject::new(Code::WeightsGguf, message));
        };
        let Some(attention) = base.attention() else {
            let message = format!(
                "{file}: {} has no config.json with model_type and head counts, which the names and rows of a GGUF file \
                 need",
                base.source()
            );
            return Err(Reject::new(Code::WeightsGguf, message));
        };
        if !known.model_types.contains(&attention.model_type.as_str()) {
            let message = format!(
                "{file}: general.architecture is {name:?}, but {} has model_type {:?}, expected {}",
                base.source(),
                excerpt(&attention.model_type),
                known.model_types.join(" or ")
            );
            return Err(Reject::new(Code::WeightsGguf, message));
        }
        Ok(Self { known, heads: attention.heads, key_value_heads: attention.key_value_heads })
    }

    /// Where a tensor belongs.
    pub fn place(&self, file: &str, name: &str) -> Loaded<Place> {
        let unknown = |code: Code, why: &str| {
            let message = format!("{file}: tensor {:?} {why}", excerpt(name));
            Err(Reject::new(code, message))
        };
        let parts = [(".weight.lora_a", true), (".weight.lora_b", false)];
        let Some((tensor, is_a)) = parts.iter().find_map(|(end, is_a)| Some((name.strip_suffix(end)?, *is_a))) else {
            let why = "is neither a .weight.lora_a nor a .weight.lora_b, and can't be ignored";
            return unknown(Code::UnknownTensor, why);
        };
        let part = if is_a { "lora_A.weight" } else { "lora_B.weight" };
        match tensor {
            "output" => return Ok(Place { key: key("lm_head", part), rewrite: None }),
            "token_embd" => {
                // The embedding's A is transposed, for it is gathered.
                let (part, rewrite) =
                    if is_a { ("lora_embedding_A", Some(Rewrite::Transpose)) } else { ("lora_embedding_B", None) };
                return Ok(Place { key: key("model.embed_tokens", part), rewrite });
            }
            _ => {}
        }
        let digits =
            |layer: &&str| layer.bytes().all(|b| b.is_ascii_digit()) && !(layer.len() > 1 && layer.starts_with('0'));
        let within =
            tensor.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).filter(|(layer, _)| digits(layer));
        let Some((layer, linear)) = within.filter(|(layer, _)| !layer.is_empty() && layer.len() < 6) else {
            return unknown(Code::UnknownTensor, "is none of blk.LAYER, output and token_embd");
        };
        if linear.contains("exp") || linear == "ffn_gate_inp" {
            return unknown(Code::ExpertLora, "is for experts or their router. Not supported in GGUF files");
        }
        let find = |table: &'static [(&'static str, &'static str)]| table.iter().find(|(name, _)| *name == linear);
        let Some((_, path)) = find(self.known.own).or_else(|| find(LINEARS)) else {
            return unknown(
                Code::UnknownTensor,
                &format!("names no linear that is known of architecture {}", self.known.name),
            );
        };
        let heads = match linear {
            _ if !self.known.permutes || is_a => None,
            "attn_q" => Some(self.heads),
            "attn_k" => Some(self.key_value_heads),
            _ => None,
        };
        Ok(Place { key: key(&format!("model.layers.{layer}.{path}"), part), rewrite: heads.map(Rewrite::Heads) })
    }
}

impl Rewrite {
    /// The tensor's shape and bytes as PEFT has them.
    pub fn apply(self, file: &str, tensor: &TensorInfo, bytes: &[u8]) -> Loaded<(Box<[usize]>, Vec<u8>)> {
        let [rows, cols] = *tensor.shape else {
            let message = format!(
                "{file}: tensor {:?} has shape {:?}, expected two dimensions",
                excerpt(&tensor.name),
                tensor.shape
            );
            return Err(Reject::new(Code::TensorShape, message));
        };
        let size = tensor.dtype.bitsize() / 8;
        let mut out = Vec::with_capacity(bytes.len());
        match self {
            Rewrite::Heads(heads) => {
                let width = rows / heads.max(1);
                if heads == 0 || rows % heads != 0 || width % 2 != 0 {
                    let message = format!(
                        "{file}: tensor {:?} has {rows} rows, expected those of {heads} heads of an even width, by the \
                         base's config.json",
                        excerpt(&tensor.name)
                    );
                    return Err(Reject::new(Code::BaseShape, message));
                }
                let row = |index: usize| &bytes[index * cols * size..(index + 1) * cols * size];
                for at in 0..rows {
                    let (head, within) = (at / width, at % width);
                    let (half, index) = (within / (width / 2), within % (width / 2));
                    out.extend_from_slice(row(head * width + 2 * index + half));
                }
                Ok((tensor.shape.clone(), out))
            }
            Rewrite::Transpose => {
                for col in 0..cols {
                    for row in 0..rows {
                        let at = (row * cols + col) * size;
                        out.extend_from_slice(&bytes[at..at + size]);
                    }
                }
                Ok(([cols, rows].into(), out))
            }
        }
    }
}
