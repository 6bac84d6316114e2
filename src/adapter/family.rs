//! Linears and embeddings of the usual model families, derived from `config.json` where no weights are at hand.
//!
//! Only a convenience: any model works with its safetensors, whatever its `model_type`.

use std::collections::HashMap;
use std::path::Path;

use super::json::{Json, excerpt};
use super::reject::{Code, Loaded, Reject};

/// What a config says about a model's modules.
#[derive(Debug, Default)]
pub(super) struct Derived {
    /// `(in, out)` by path.
    pub linears: HashMap<String, (usize, usize)>,
    /// `(rows, width)` by path.
    pub embeddings: HashMap<String, (usize, usize)>,
}

/// A width, as the config's fields give it.
#[derive(Clone, Copy, Debug)]
enum Width {
    Hidden,
    /// Of the feed-forward layer.
    Inner,
    TwoInner,
    /// Heads times their width.
    Query,
    /// Key-value heads times their width.
    KeyValue,
    /// Query, key and value side by side.
    All,
    Vocabulary,
    Experts,
}
use Width::{All, Experts, Hidden, Inner, KeyValue, Query, TwoInner, Vocabulary};

type Module = (&'static str, Width, Width);

/// Families whose layers look alike.
struct Family {
    model_types: &'static [&'static str],
    /// Path before the layer index.
    stack: &'static str,
    layer: &'static [Module],
    /// Linears outside of layers.
    outside: &'static [Module],
    embedding: &'static str,
}

const QKVO: [Module; 4] = [
    ("self_attn.q_proj", Hidden, Query),
    ("self_attn.k_proj", Hidden, KeyValue),
    ("self_attn.v_proj", Hidden, KeyValue),
    ("self_attn.o_proj", Query, Hidden),
];
const HEAD: &[Module] = &[("lm_head", Hidden, Vocabulary)];
const ENCODER: &[Module] = &[
    ("attention.self.query", Hidden, Hidden),
    ("attention.self.key", Hidden, Hidden),
    ("attention.self.value", Hidden, Hidden),
    ("attention.output.dense", Hidden, Hidden),
    ("intermediate.dense", Hidden, Inner),
    ("output.dense", Inner, Hidden),
];
const GPT2: &[Module] = &[
    ("attn.c_attn", Hidden, All),
    ("attn.c_proj", Hidden, Hidden),
    ("mlp.c_fc", Hidden, Inner),
    ("mlp.c_proj", Inner, Hidden),
];
const FUSED_ATTENTION: &[Module] = &[
    ("attention.query_key_value", Hidden, All),
    ("attention.dense", Hidden, Hidden),
    ("mlp.dense_h_to_4h", Hidden, Inner),
    ("mlp.dense_4h_to_h", Inner, Hidden),
];
const FUSED_SELF_ATTENTION: &[Module] = &[
    ("self_attention.query_key_value", Hidden, All),
    ("self_attention.dense", Hidden, Hidden),
    ("mlp.dense_h_to_4h", Hidden, Inner),
    ("mlp.dense_4h_to_h", Inner, Hidden),
];

const FAMILIES: &[Family] = &[
    Family {
        model_types: &[
            "llama",
            "mistral",
            "ministral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "granite",
            "olmo",
            "olmo2",
            "olmo3",
            "stablelm",
            "smollm3",
            "cohere",
            "cohere2",
            "seed_oss",
            "helium",
            "exaone4",
            "hunyuan_v1_dense",
            "ernie4_5",
            "qwen2_vl",
            "qwen2_5_vl",
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen3_vl_text",
            "apertus",
        ],
        stack: "model.layers",
        layer: &[
            QKVO[0],
            QKVO[1],
            QKVO[2],
            QKVO[3],
            ("mlp.gate_proj", Hidden, Inner),
            ("mlp.up_proj", Hidden, Inner),
            ("mlp.down_proj", Inner, Hidden),
        ],
        outside: HEAD,
        embedding: "model.embed_tokens",
    },
    Family {
        model_types: &["arcee", "nemotron"],
        stack: "model.layers",
        layer: &[QKVO[0], QKVO[1], QKVO[2], QKVO[3], ("mlp.up_proj", Hidden, Inner), ("mlp.down_proj", Inner, Hidden)],
        outside: HEAD,
        embedding: "model.embed_tokens",
    },
    Family {
        model_types: &["glm", "glm4"],
        stack: "model.layers",
        layer: &[
            QKVO[0],
            QKVO[1],
            QKVO[2],
            QKVO[3],
            ("mlp.gate_up_proj", Hidden, TwoInner),
            ("mlp.down_proj", Inner, Hidden),
        ],
        outside: HEAD,
        embedding: "model.embed_tokens",
    },
    Family {
        model_types: &["mixtral", "qwen3_moe"],
        stack: "model.layers",
        layer: &[QKVO[0], QKVO[1], QKVO[2], QKVO[3], ("mlp.gate", Hidden, Experts)],
        outside: HEAD,
        embedding: "model.embed_tokens",
    },
    Family {
        model_types: &["gpt_oss"],
        stack: "model.layers",
        layer: &[QKVO[0], QKVO[1], QKVO[2], QKVO[3], ("mlp.router", Hidden, Experts)],
        outside: HEAD,
        embedding: "model.embed_tokens",
    },
    Family {
        model_types: &["phi3"],
        stack: "model.layers",
        layer: &[
            ("self_attn.qkv_proj", Hidden, All),
            ("self_attn.o_proj", Query, Hidden),
            ("mlp.gate_up_proj", Hidden, TwoInner),
            ("mlp.down_proj", Inner, Hidden),
        ],
        outside: HEAD,
        embedding: "model.embed_tokens",
    },
    Family {
        model_types: &["phi"],
        stack: "model.layers",
        layer: &[
            QKVO[0],
            QKVO[1],
            QKVO[2],
            ("self_attn.dense", Query, Hidden),
            ("mlp.fc1", Hidden, Inner),
            ("mlp.fc2", Inner, Hidden),
        ],
        outside: HEAD,
        embedding: "model.embed_tokens",
    },
    Family {
        model_types: &["starcoder2"],
        stack: "model.layers",
        layer: &[QKVO[0], QKVO[1], QKVO[2], QKVO[3], ("mlp.c_fc", Hidden, Inner), ("mlp.c_proj", Inner, Hidden)],
        outside: HEAD,
        embedding: "model.embed_tokens",
    },
    Family {
        model_types: &["opt"],
        stack: "model.decoder.layers",
        layer: &[
            ("self_attn.q_proj", Hidden, Hidden),
            ("self_attn.k_proj", Hidden, Hidden),
            ("self_attn.v_proj", Hidden, Hidden),
            ("self_attn.out_proj", Hidden, Hidden),
            ("fc1", Hidden, Inner),
            ("fc2", Inner, Hidden),
        ],
        outside: &[],
        embedding: "model.decoder.embed_tokens",
    },
    Family { model_types: &["gpt2"], stack: "transformer.h", layer: GPT2, outside: HEAD, embedding: "transformer.wte" },
    Family {
        model_types: &["gptj"],
        stack: "transformer.h",
        layer: &[
            ("attn.q_proj", Hidden, Hidden),
            ("attn.k_proj", Hidden, Hidden),
            ("attn.v_proj", Hidden, Hidden),
            ("attn.out_proj", Hidden, Hidden),
            ("mlp.fc_in", Hidden, Inner),
            ("mlp.fc_out", Inner, Hidden),
        ],
        outside: HEAD,
        embedding: "transformer.wte",
    },
    Family {
        model_types: &["gpt_neox"],
        stack: "gpt_neox.layers",
        layer: FUSED_ATTENTION,
        outside: &[("embed_out", Hidden, Vocabulary)],
        embedding: "gpt_neox.embed_in",
    },
    Family {
        model_types: &["bloom"],
        stack: "transformer.h",
        layer: FUSED_SELF_ATTENTION,
        outside: HEAD,
        embedding: "transformer.word_embeddings",
    },
    Family {
        model_types: &["bert"],
        stack: "bert.encoder.layer",
        layer: ENCODER,
        outside: &[("bert.pooler.dense", Hidden, Hidden)],
        embedding: "bert.embeddings.word_embeddings",
    },
    Family {
        model_types: &["roberta", "xlm-roberta", "camembert"],
        stack: "roberta.encoder.layer",
        layer: ENCODER,
        outside: &[("roberta.pooler.dense", Hidden, Hidden)],
        embedding: "roberta.embeddings.word_embeddings",
    },
    Family {
        model_types: &["distilbert"],
        stack: "distilbert.transformer.layer",
        layer: &[
            ("attention.q_lin", Hidden, Hidden),
            ("attention.k_lin", Hidden, Hidden),
            ("attention.v_lin", Hidden, Hidden),
            ("attention.out_lin", Hidden, Hidden),
            ("ffn.lin1", Hidden, Inner),
            ("ffn.lin2", Inner, Hidden),
        ],
        outside: &[("pre_classifier", Hidden, Hidden)],
        embedding: "distilbert.embeddings.word_embeddings",
    },
];

/// Layers that a config may have: more is a damaged file.
const MAX_LAYERS: usize = 10_000;

/// The modules of a model by its config.
///
/// # Errors
/// [`Code::BaseFamily`] for a model that is not in the table, [`Code::BaseFile`] for a config without a field that
/// its shapes need.
pub(super) fn linears(path: &Path, config: &Json) -> Loaded<Derived> {
    let file = path.display().to_string();
    let whole = config.get("model_type").and_then(Json::as_str).unwrap_or_default();
    // A vision-language model: its text model is described inside, and lies below `language_model`.
    let inner = config.get("text_config").filter(|text| matches!(text, Json::Object(_)));
    let text = inner.unwrap_or(config);
    let model_type = text.get("model_type").and_then(Json::as_str).unwrap_or(whole);
    let Some(family) = FAMILIES.iter().find(|family| family.model_types.contains(&model_type)) else {
        let message = format!(
            "{file}: model_type is {:?}; its shapes can't be derived from config.json alone, so the base's safetensors \
             are needed beside it",
            excerpt(model_type)
        );
        return Err(Reject::new(Code::BaseFamily, message));
    };
    let fields = Fields { file: &file, json: text, model_type };
    let layers = fields.need(&["num_hidden_layers", "n_layer", "n_layers"])?;
    if layers > MAX_LAYERS {
        let message = format!("{file}: declares {layers} layers, expected at most {MAX_LAYERS}");
        return Err(Reject::new(Code::BaseFile, message));
    }
    let place = |path: &str| match (inner, path.strip_prefix("model.")) {
        (Some(_), Some(rest)) => format!("model.language_model.{rest}"),
        _ => path.to_owned(),
    };
    let mut derived = Derived::default();
    for (module, inputs, outputs) in family.layer {
        let shape = (fields.width(*inputs)?, fields.width(*outputs)?);
        let stack = place(family.stack);
        derived.linears.extend((0..layers).map(|layer| (format!("{stack}.{layer}.{module}"), shape)));
    }
    for (module, inputs, outputs) in family.outside {
        derived.linears.insert(place(module), (fields.width(*inputs)?, fields.width(*outputs)?));
    }
    let mut embedding = fields.width(Hidden)?;
    if model_type == "opt" {
        // OPT's embedding may be narrower than its layers; two linears lead in and out.
        let hidden = embedding;
        embedding = fields.may(&["word_embed_proj_dim"])?.unwrap_or(hidden);
        derived.linears.insert("lm_head".into(), (embedding, fields.width(Vocabulary)?));
        if embedding != hidden {
            derived.linears.insert("model.decoder.project_in".into(), (embedding, hidden));
            derived.linears.insert("model.decoder.project_out".into(), (hidden, embedding));
        }
    }
    derived.embeddings.insert(place(family.embedding), (fields.width(Vocabulary)?, embedding));
    Ok(derived)
}

/// The widths of a model's attention, as its config gives them.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    /// Of the text model, where there are several.
    pub model_type: String,
    /// Of queries.
    pub heads: usize,
    /// Of keys and of values.
    pub key_value_heads: usize,
    /// One head of keys and values for all, in models that say so by a flag.
    pub multi_query: bool,
    /// Rows of all queries.
    pub query: usize,
    /// Rows of all keys, and of all values.
    pub key_value: usize,
}

/// What `config` says of a model's attention, if it does.
pub(super) fn attention(path: &Path, config: &Json) -> Loaded<Attention> {
    let file = path.display().to_string();
    let inner = config.get("text_config").filter(|text| matches!(text, Json::Object(_)));
    let json = inner.unwrap_or(config);
    let model_type = json.get("model_type").or(config.get("model_type")).and_then(Json::as_str).unwrap_or_default();
    let fields = Fields { file: &file, json, model_type };
    let heads = fields.heads()?;
    let multi_query = json.get("multi_query").and_then(Json::as_bool).unwrap_or(false);
    let key_value_heads = if multi_query { 1 } else { fields.key_value_heads()? };
    let width = fields.head_width()?;
    Ok(Attention {
        model_type: model_type.to_owned(),
        heads,
        key_value_heads,
        multi_query,
        query: heads * width,
        key_value: key_value_heads * width,
    })
}

/// Sizes in a config, by the names that families give them.
struct Fields<'a> {
    file: &'a str,
    json: &'a Json,
    model_type: &'a str,
}

impl Fields<'_> {
    /// The first of these fields that is there and not null.
    fn may(&self, names: &[&str]) -> Loaded<Option<usize>> {
        let Some((name, value)) =
            names.iter().find_map(|name| Some((name, self.json.get(name).filter(|v| **v != Json::Null)?)))
        else {
            return Ok(None);
        };
        // A width that a weight could have.
        match value.as_int() {
            Some(size) if (1..=1 << 28).contains(&size) => Ok(Some(size as usize)),
            _ => {
                let message = format!("{}: {name} is {value}, expected a whole number of 1 or more", self.file);
                Err(Reject::new(Code::BaseFile, message))
            }
        }
    }

    fn need(&self, names: &[&str]) -> Loaded<usize> {
        self.may(names)?.ok_or_else(|| {
            let message = format!("{}: has no {}, which the shapes of {} need", self.file, names[0], self.model_type);
            Reject::new(Code::BaseFile, message)
        })
    }

    fn width(&self, width: Width) -> Loaded<usize> {
        Ok(match width {
            Hidden => self.need(&["hidden_size", "n_embd", "dim", "d_model", "n_embed"])?,
            Inner => match self.may(&["intermediate_size", "ffn_dim", "n_inner", "hidden_dim"])? {
                Some(inner) => inner,
                None if matches!(self.model_type, "gpt2" | "gptj" | "bloom") => 4 * self.width(Hidden)?,
                None => self.need(&["intermediate_size"])?,
            },
            TwoInner => 2 * self.width(Inner)?,
            Query => self.heads()? * self.head_width()?,
            KeyValue => self.key_value_heads()? * self.head_width()?,
            All if self.may(&["num_key_value_heads"])?.is_some() => self.width(Query)? + 2 * self.width(KeyValue)?,
            All => 3 * self.width(Hidden)?,
            Vocabulary => self.need(&["vocab_size"])?,
            Experts => self.need(&["num_local_experts", "num_experts"])?,
        })
    }

    fn heads(&self) -> Loaded<usize> {
        self.need(&["num_attention_heads", "n_head", "n_heads"])
    }

    fn key_value_heads(&self) -> Loaded<usize> {
        self.may(&["num_key_value_heads"])?.map_or_else(|| self.heads(), Ok)
    }

    fn head_width(&self) -> Loaded<usize> {
        if let Some(width) = self.may(&["head_dim"])? {
            return Ok(width);
        }
        // What transformers takes where the field is absent.
        match self.model_type {
            "gemma" | "gemma2" | "gemma3_text" => Ok(256),
            "qwen3" | "qwen3_vl_text" => Ok(128),
            "gpt_oss" => Ok(64),
            _ => Ok(self.width(Hidden)? / self.heads()?),
        }
    }
}
