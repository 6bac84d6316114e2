//! Prints the contract as a prelude in each of the three kernel languages.

use super::*;

/// Type of a field of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// Unsigned 32-bit.
    U32,
    /// Signed 32-bit.
    I32,
    /// binary32.
    F32,
    /// `SiteParams[MAX_SITES]`.
    Sites,
    /// `u32[BGMV_PACK_ROWS]`.
    Rows,
}

/// A field of a block.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub ty: Type,
    /// Its doc comment, line by line.
    pub doc: &'static [&'static str],
}

/// A block of the contract, as data.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Its name.
    pub name: &'static str,
    /// Its doc comment, line by line.
    pub doc: &'static [&'static str],
    /// Its fields in memory order.
    pub fields: &'static [Field],
}

/// A kernel language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// CUDA C++.
    Cuda,
    /// GLSL for Vulkan, with buffer references.
    Glsl,
    /// WGSL.
    Wgsl,
}

impl Language {
    /// All three.
    pub const ALL: [Language; 3] = [Language::Cuda, Language::Glsl, Language::Wgsl];

    /// Where the rendered prelude is checked in, from the crate's root.
    pub const fn path(self) -> &'static str {
        match self {
            Language::Cuda => "kernels-cuda/contract.cuh",
            Language::Glsl => "kernels-spirv/contract.glsl",
            Language::Wgsl => "kernels-wgsl/contract.wgsl",
        }
    }

    fn ty(self, ty: Type) -> &'static str {
        match (self, ty) {
            (Language::Cuda, Type::U32 | Type::Rows) => "unsigned int",
            (Language::Glsl, Type::U32 | Type::Rows) => "uint",
            (Language::Wgsl, Type::U32 | Type::Rows) => "u32",
            (Language::Wgsl, Type::I32) => "i32",
            (_, Type::I32) => "int",
            (Language::Wgsl, Type::F32) => "f32",
            (_, Type::F32) => "float",
            (_, Type::Sites) => "SiteParams",
        }
    }
}

const BLOCKS: [Block; 5] = [RowRef::BLOCK, Tile::BLOCK, Pack::BLOCK, SiteParams::BLOCK, Params::BLOCK];

const CONSTANTS: [(&str, u32); 20] = [
    ("MAX_SITES", MAX_SITES as u32),
    ("MAX_OPERANDS", MAX_OPERANDS as u32),
    ("THREADS", THREADS),
    ("BGMV_SHRINK_RANKS", BGMV_SHRINK_RANKS),
    ("BGMV_EXPAND_OUTPUTS", BGMV_EXPAND_OUTPUTS),
    ("BGMV_PACK_ROWS", BGMV_PACK_ROWS as u32),
    ("SGMV_TILE_ROWS", SGMV_TILE_ROWS),
    ("SGMV_SHRINK_RANKS", SGMV_SHRINK_RANKS),
    ("SGMV_EXPAND_OUTPUTS", SGMV_EXPAND_OUTPUTS),
    ("SGMV_DEPTH", SGMV_DEPTH),
    ("MAX_RANK", MAX_RANK),
    ("RANK_MASK", RANK_MASK),
    ("RANK_VECTORS", RANK_VECTORS),
    ("Z_PARTS", Z_PARTS),
    ("Z_RANKS", Z_RANKS),
    ("MAX_TOKEN_ROWS", MAX_TOKEN_ROWS),
    ("OVERLAY_ROWS", OVERLAY_ROWS),
    ("VECTOR_ALIGN", VECTOR_ALIGN),
    ("ROUTED_TOKENS", ROUTED_TOKENS),
    ("ROUTED_OFFSETS", ROUTED_OFFSETS),
];

/// The prelude in `language`: constants, dtype codes, kernel operand lists (as comments) and blocks.
pub fn prelude(language: Language) -> String {
    let mut out =
        String::from("// Generated from src/contract/ by `cargo run --example render_contract`. Don't edit.\n");
    if language == Language::Cuda {
        out.push_str("#pragma once\n");
    }
    out.push('\n');
    let mut constant = |name: &str, value: u32| {
        out.push_str(&match language {
            Language::Cuda => format!("constexpr unsigned int {name} = {value};\n"),
            Language::Glsl => format!("const uint {name} = {value};\n"),
            Language::Wgsl => format!("const {name}: u32 = {value}u;\n"),
        });
    };
    for (name, value) in CONSTANTS {
        constant(name, value);
    }
    for dtype in DType::ALL {
        constant(&format!("DTYPE_{}", dtype.name().to_uppercase()), dtype as u32);
    }
    for kernel in Kernel::ALL {
        let names: Vec<_> = kernel.operands().iter().map(|o| o.name).collect();
        out.push_str(&format!("\n// {}: {}", kernel.name(), names.join(", ")));
    }
    out.push('\n');
    for block in BLOCKS {
        out.push('\n');
        block.doc.iter().for_each(|line| out.push_str(&format!("//{line}\n")));
        out.push_str(&format!("struct {} {{\n", block.name));
        for field in block.fields {
            field.doc.iter().for_each(|line| out.push_str(&format!("    //{line}\n")));
            let ty = language.ty(field.ty);
            out.push_str(&match (language, field.ty) {
                (Language::Wgsl, Type::Sites) => format!("    {}: array<{ty}, {MAX_SITES}>,\n", field.name),
                (Language::Wgsl, Type::Rows) => format!("    {}: array<{ty}, {BGMV_PACK_ROWS}>,\n", field.name),
                (Language::Wgsl, _) => format!("    {}: {ty},\n", field.name),
                (_, Type::Sites) => format!("    {ty} {}[MAX_SITES];\n", field.name),
                (_, Type::Rows) => format!("    {ty} {}[BGMV_PACK_ROWS];\n", field.name),
                _ => format!("    {ty} {};\n", field.name),
            });
        }
        out.push_str(if language == Language::Wgsl { "}\n" } else { "};\n" });
    }
    out.push_str(envelope(language));
    out
}

/// How a launch reaches a kernel where operands are not plain function arguments.
fn envelope(language: Language) -> &'static str {
    match language {
        Language::Cuda => "",
        Language::Glsl => {
            "
// What the one push constant, an address, points at. Addresses are low word, high word.
struct Envelope {
    // Addresses of the operands, in order; absent ones are 0.
    uvec2 operand[MAX_OPERANDS];
    Params params;
};
"
        }
        Language::Wgsl => {
            "
// The uniform binding. Operand i is storage binding i of group 0, an array of 32-bit words.
struct Envelope {
    params: Params,
    // Bytes from the start of storage binding i to operand i: bindings begin at the device's alignment.
    origin: array<vec4<u32>, 2>,
}
"
        }
    }
}
