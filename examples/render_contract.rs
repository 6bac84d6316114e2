//! Writes the contract's preludes beside the kernels. Run after a change in `src/contract/`.

use lorapool::contract::render::{Language, prelude};

fn main() -> std::io::Result<()> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    for language in Language::ALL {
        std::fs::write(root.join(language.path()), prelude(language))?;
        println!("wrote {}", language.path());
    }
    Ok(())
}
