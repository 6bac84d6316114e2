//! Why an adapter or a base is refused: one stable code per kind of fault, all of them in one table.

use std::fmt;

/// Writes the enum, its strings and its table from one list.
macro_rules! codes {
    ($($variant:ident $string:literal $description:literal)*) => {
        /// Kind of fault. The same kind has the same code everywhere; the message says where and what.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $(#[doc = $description] $variant,)*
        }

        impl Code {
            /// Every code there is.
            pub const ALL: &[Code] = &[$(Code::$variant),*];

            /// The stable string: `E_...`.
            pub const fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $string,)* }
            }

            /// One line on the kind of fault.
            pub const fn describe(self) -> &'static str {
                match self { $(Code::$variant => $description,)* }
            }
        }
    };
}

codes! {
    // Files
    NotFound "E_NOT_FOUND" "There is no directory or file at the path, or it can't be read."
    NotADirectory "E_NOT_A_DIRECTORY" "A base is a directory, an adapter a directory or a GGUF file; the path is something else."
    ConfigMissing "E_CONFIG_MISSING" "The directory has no adapter_config.json."
    WeightsMissing "E_WEIGHTS_MISSING" "The directory has no adapter_model.safetensors, nor the index of one in shards."
    WeightsPickle "E_WEIGHTS_PICKLE" "The weights are a pickle (.bin, .pt), which can run code: convert them to safetensors."
    WeightsGguf "E_WEIGHTS_GGUF" "The GGUF file is no LoRA, is of an architecture or element type that can't be turned back, is for another model than the base, or no base is given."
    ShardIndex "E_SHARD_INDEX" "The index of a sharded adapter is absent, is not what the format asks for, or stands beside a file of all weights."
    ShardMissing "E_SHARD_MISSING" "A shard that the index names is not there."
    ShardTensor "E_SHARD_TENSOR" "Index and shards do not agree on where a tensor is."
    SeveralAdapters "E_SEVERAL_ADAPTERS" "The directory or the file holds more than one adapter: name the one that is meant."
    FileLfsPointer "E_FILE_LFS_POINTER" "The file is a Git LFS pointer: fetch the real one with `git lfs pull`."
    FileHtml "E_FILE_HTML" "The file is a web page, such as a log-in or error page, instead of the download."
    FileEmpty "E_FILE_EMPTY" "The file has no bytes."
    FileTruncated "E_FILE_TRUNCATED" "The file ends before what it declares: a download was cut."
    FileTooLarge "E_FILE_TOO_LARGE" "The file, or its header, is larger than any real one."
    FileHeader "E_FILE_HEADER" "The header of the safetensors or GGUF file is not what the format asks for."
    FileOffsets "E_FILE_OFFSETS" "Tensor bytes overlap, leave holes, or don't agree with dtype and shape."
    FileTrailing "E_FILE_TRAILING" "Bytes follow the last tensor."
    FileDuplicate "E_FILE_DUPLICATE" "The header names a tensor twice, or two shards hold it."
    // adapter_model.bin, when it is converted
    PickleArchive "E_PICKLE_ARCHIVE" "The file is not the zip that torch.save has written since torch 1.6, is damaged, or has entries elsewhere than torch puts them."
    PickleGlobal "E_PICKLE_GLOBAL" "The pickle names a class or function that no state dict of tensors needs; nothing of it was run."
    PickleOpcode "E_PICKLE_OPCODE" "The pickle has an opcode that no state dict needs, or is broken."
    PickleValue "E_PICKLE_VALUE" "The pickle is no flat dict of tensors by name."
    PickleTensor "E_PICKLE_TENSOR" "A tensor's shape, strides and offset don't lie in its storage."
    PickleSize "E_PICKLE_SIZE" "The pickle makes more values, or more bytes of tensors, than an adapter of its length has."
    // adapter_config.json
    ConfigJson "E_CONFIG_JSON" "The file is not JSON, not UTF-8, or not an object."
    ConfigDuplicate "E_CONFIG_DUPLICATE" "A JSON key appears twice, so the file is ambiguous."
    ConfigType "E_CONFIG_TYPE" "A field has a value of another type than PEFT writes."
    ConfigRank "E_CONFIG_RANK" "A rank in the config is not a whole number of 1 or more."
    ConfigAlpha "E_CONFIG_ALPHA" "An alpha is not finite, or its scale is beyond f32."
    AlphaConflict "E_ALPHA_CONFLICT" "A module's alpha tensor and its alpha in the config differ, and neither is the rule for the other."
    ConfigPattern "E_CONFIG_PATTERN" "A rank_pattern or alpha_pattern key is not a regular expression that can be matched."
    ConfigUnknownField "E_CONFIG_UNKNOWN_FIELD" "A field that is not known here is set, so its meaning would be lost."
    // Other methods than plain LoRA
    PeftTypeUnknown "E_PEFT_TYPE_UNKNOWN" "peft_type names a method that is not known here."
    PeftAdalora "E_PEFT_ADALORA" "peft_type ADALORA."
    PeftVera "E_PEFT_VERA" "peft_type VERA."
    PeftLoha "E_PEFT_LOHA" "peft_type LOHA."
    PeftLokr "E_PEFT_LOKR" "peft_type LOKR."
    PeftIa3 "E_PEFT_IA3" "peft_type IA3."
    PeftOft "E_PEFT_OFT" "peft_type OFT or BOFT."
    PeftPrompt "E_PEFT_PROMPT" "peft_type of the prompt family: PROMPT_TUNING, P_TUNING, PREFIX_TUNING, MULTITASK_PROMPT_TUNING, CPT, CARTRIDGE."
    PeftTrainableTokens "E_PEFT_TRAINABLE_TOKENS" "peft_type TRAINABLE_TOKENS."
    PeftOther "E_PEFT_OTHER" "Another peft_type of PEFT's that is not LoRA; the message names it."
    Alora "E_ALORA" "Activated LoRA: the delta applies only from the invocation tokens on."
    LayerReplication "E_LAYER_REPLICATION" "layer_replication: the adapter is for a base with copied layers."
    InitPissa "E_INIT_PISSA" "PiSSA: the adapter is for a base from which its own start was subtracted."
    InitOlora "E_INIT_OLORA" "OLoRA: the adapter is for a base from which its own start was subtracted."
    InitCorda "E_INIT_CORDA" "CorDA: the adapter is for a base from which its own start was subtracted."
    InitLoftq "E_INIT_LOFTQ" "LoftQ: the adapter is for a base that was quantised together with it."
    InitUnknown "E_INIT_UNKNOWN" "init_lora_weights names a start that is not known here, so the base may have been changed."
    Bdlora "E_BDLORA" "BD-LoRA: block-diagonal A or B."
    Kasa "E_KASA" "KaSA: a diagonal between B and A."
    Qalora "E_QALORA" "QALoRA: inputs are pooled by groups of a quantised base."
    Arrow "E_ARROW" "Arrow: a router over several adapters."
    Monteclora "E_MONTECLORA" "MonteCLoRA: weights are sampled."
    Megatron "E_MEGATRON" "megatron_config: the linears are Megatron's parallel ones."
    // Parts of LoRA
    Dora "E_DORA" "DoRA without the base's weights at hand, with magnitudes missing or unasked for, or with a row of norm 0."
    LoraBias "E_LORA_BIAS" "lora_bias without a bias of lora_B, a bias without lora_bias, or with DoRA."
    BaseBias "E_BASE_BIAS" "The adapter replaces a bias of the base."
    EmbeddingLora "E_EMBEDDING_LORA" "lora_A and lora_B of a linear for what is an embedding in the base, or the reverse."
    TrainableTokens "E_TRAINABLE_TOKENS" "Rows of trained tokens and the ids in the config don't agree, or LoRA is on the same table."
    ModulesToSave "E_MODULES_TO_SAVE" "A whole module of the base is replaced, other than a task's head, an embedding of tokens or the head over them, or more rows of a table than an overlay holds."
    ExpertLora "E_EXPERT_LORA" "LoRA on the experts of a mixture in a form, or of a shape, that the base or the config does not bear out."
    ConvLora "E_CONV_LORA" "LoRA on a convolution."
    // Tensors
    NoTensors "E_NO_TENSORS" "No tensor can be applied: the adapter would answer like the base."
    UnknownTensor "E_UNKNOWN_TENSOR" "A tensor is no part of a LoRA adapter, and can't be ignored."
    TensorDuplicate "E_TENSOR_DUPLICATE" "Two tensors are the same part of the same site."
    Unpaired "E_UNPAIRED" "lora_A without lora_B, or the reverse."
    TensorEmpty "E_TENSOR_EMPTY" "A tensor has no element: the save did not gather it (DeepSpeed ZeRO-3)."
    TensorShape "E_TENSOR_SHAPE" "A tensor does not have the dimensions of its part."
    Swapped "E_SWAPPED" "lora_A and lora_B are exchanged or transposed."
    RankMismatch "E_RANK_MISMATCH" "The tensors' rank is not the one that the config gives the module."
    RankLimit "E_RANK_LIMIT" "The rank is beyond what the kernels do."
    Dtype "E_DTYPE" "The element type is none of F32, F16, BF16, F64."
    NotFinite "E_NOT_FINITE" "A weight is NaN or infinite."
    Range "E_RANGE" "A finite weight is beyond the range of the element type it must be stored in."
    // Several adapters made one
    Merge "E_MERGE" "Adapters of which one has something that can't be added up, or a weight that leaves the range of f32."
    // Against the base
    Prefix "E_PREFIX" "Keys don't start with base_model.model., and no base is given, or they fit no one place in it."
    NotInBase "E_NOT_IN_BASE" "The base has no linear at the tensor's path."
    BaseShape "E_BASE_SHAPE" "The tensor's width is not the base's."
    Vocabulary "E_VOCABULARY" "The vocabulary was resized: rows of the head or embedding are not the base's."
    FusedMismatch "E_FUSED_MISMATCH" "The base's linear is fused (qkv_proj, gate_up_proj) and the adapter's is not, or the reverse, and which rows are whose is not known."
    BaseLayer "E_BASE_LAYER" "A copy of a base weight in the adapter differs from the base, or can't be compared."
    // The base itself
    BaseFile "E_BASE_FILE" "A file of the base is missing or can't be understood."
    BaseFamily "E_BASE_FAMILY" "The shapes of this model_type can't be derived from config.json: its safetensors are needed."
    BaseConflict "E_BASE_CONFLICT" "Two adapters give one site different shapes, so that no base has both."
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl serde::Serialize for Code {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// A refusal: what was found where, what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reject {
    /// Kind of fault.
    pub code: Code,
    /// File, tensor or field, what was found, what was expected.
    pub message: String,
}

impl Reject {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Box<Self> {
        Box::new(Self { code, message: message.into() })
    }
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Reject {}

/// Result of the loader's own steps. Boxed: a refusal is rare, the value is passed through many hands.
pub(super) type Loaded<T> = Result<T, Box<Reject>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_well_formed() {
        let mut strings: Vec<_> = Code::ALL.iter().map(|c| c.as_str()).collect();
        assert!(strings.iter().all(
            |s| s.starts_with("E_") && s.bytes().all(|b| b == b'_' || b.is_ascii_uppercase() || b.is_ascii_digit())
        ));
        strings.sort_unstable();
        strings.dedup();
        assert_eq!(strings.len(), Code::ALL.len());
        assert!(Code::ALL.iter().all(|c| c.describe().ends_with('.')));
    }
}
