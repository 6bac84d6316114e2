//! GGUF files, by hand: as llama.cpp's converter writes them, and as no one should.

use super::Files;

/// A file to be written.
#[derive(Clone, Debug)]
pub struct Gguf {
    pub version: u32,
    /// Key, type, bytes of the value.
    pub meta: Vec<(String, u32, Vec<u8>)>,
    /// Name, dimensions from the fastest on, type, bytes.
    pub tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
    pub alignment: usize,
    /// Offsets that are not what they should be, by tensor.
    pub offsets: Vec<(usize, u64)>,
    /// Whether the last tensor is padded as every other.
    pub padded: bool,
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl Gguf {
    /// A LoRA without tensors.
    pub fn lora(architecture: &str, alpha: f32) -> Self {
        let new = Self {
            version: 3,
            meta: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
            offsets: Vec::new(),
            padded: true,
        };
        new.text("general.architecture", architecture)
            .text("general.type", "adapter")
            .text("adapter.type", "lora")
            .meta("general.quantization_version", 4, &2u32.to_le_bytes())
            .meta("adapter.lora.alpha", 6, &alpha.to_le_bytes())
    }

    /// Adds a metadata entry, or replaces it.
    pub fn meta(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.meta.retain(|(name, ..)| name != key);
        self.meta.push((key.into(), kind, value.into()));
        self
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.meta(key, 8, &text(value))
    }

    pub fn without(mut self, key: &str) -> Self {
        self.meta.retain(|(name, ..)| name != key);
        self
    }

    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, bytes: &[u8]) -> Self {
        self.tensors.push((name.into(), dims.into(), kind, bytes.into()));
        self
    }

    /// A pair of F32 tensors of small known values.
    pub fn pair(self, name: &str, rank: u64, inputs: u64, outputs: u64) -> Self {
        let values = |count: u64| (0..count).flat_map(|i| (i as f32 / 64.0 - 0.25).to_le_bytes()).collect::<Vec<_>>();
        self.tensor(&format!("{name}.weight.lora_a"), &[inputs, rank], 0, &values(inputs * rank)).tensor(
            &format!("{name}.weight.lora_b"),
            &[rank, outputs],
            0,
            &values(rank * outputs),
        )
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.meta.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.meta {
            out.extend(text(key));
            out.extend(kind.to_le_bytes());
            out.extend(value);
        }
        let mut offset = 0;
        for (index, (name, dims, kind, bytes)) in self.tensors.iter().enumerate() {
            out.extend(text(name));
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            let wrong = self.offsets.iter().find(|(at, _)| *at == index).map(|(_, offset)| *offset);
            out.extend(wrong.unwrap_or(offset as u64).to_le_bytes());
            offset += bytes.len().next_multiple_of(self.alignment);
        }
        for (index, (.., bytes)) in self.tensors.iter().enumerate() {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(bytes);
            if index + 1 == self.tensors.len() && self.padded {
                out.resize(out.len().next_multiple_of(self.alignment), 0);
            }
        }
        out
    }

    /// What llama.cpp's converter makes of an adapter of PEFT's for a Llama-like model: other names, and, where
    /// `heads` are given for q and k, the rows of each head from halves to pairs.
    pub fn converted(files: &Files, architecture: &str, heads: Option<[usize; 2]>) -> Self {
        let mut gguf = Self::lora(architecture, files.config["lora_alpha"].as_f64().unwrap() as f32);
        for (name, dtype, shape, bytes) in &files.tensors {
            let (path, part) = name.strip_prefix("base_model.model.").unwrap().split_once(".lora_").unwrap();
            let (layer, linear) = match path.strip_prefix("model.layers.") {
                Some(rest) => rest.split_once('.').unwrap(),
                None => ("", path),
            };
            let linear = match linear {
                "self_attn.q_proj" => "attn_q",
                "self_attn.k_proj" => "attn_k",
                "self_attn.v_proj" => "attn_v",
                "self_attn.o_proj" => "attn_output",
                "self_attn.qkv_proj" => "attn_qkv",
                "mlp.gate_proj" => "ffn_gate",
                "mlp.up_proj" | "mlp.gate_up_proj" => "ffn_up",
                "mlp.down_proj" => "ffn_down",
                "lm_head" => "output",
                other => panic!("{other}"),
            };
            let side = if part.starts_with('A') { "a" } else { "b" };
            let heads = match (linear, side, heads) {
                ("attn_q", "b", Some([heads, _])) | ("attn_k", "b", Some([_, heads])) => heads,
                _ => 0,
            };
            let name = match layer {
                "" => format!("{linear}.weight.lora_{side}"),
                layer => format!("blk.{layer}.{linear}.weight.lora_{side}"),
            };
            let kind = match *dtype {
                "F32" => 0,
                "F16" => 1,
                "F64" => 28,
                "BF16" => 30,
                other => panic!("{other}"),
            };
            let dims: Vec<u64> = shape.iter().rev().map(|dim| *dim as u64).collect();
            gguf = gguf.tensor(&name, &dims, kind, &turn(bytes, shape[0], heads));
        }
        gguf
    }
}

/// `weights.reshape(heads, 2, width / 2, ...).swapaxes(1, 2)`, row by row.
fn turn(bytes: &[u8], rows: usize, heads: usize) -> Vec<u8> {
    if heads == 0 {
        return bytes.into();
    }
    let (row, half) = (bytes.len() / rows, rows / heads / 2);
    let mut out = Vec::new();
    for head in 0..heads {
        for i in 0..half {
            for p in 0..2 {
                let from = (head * 2 + p) * half + i;
                out.extend(&bytes[from * row..(from + 1) * row]);
            }
        }
    }
    out
}
