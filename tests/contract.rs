//! The checked-in preludes of the kernel languages are what the contract renders.

use lorapool::contract::render::{Language, prelude};

#[test]
fn checked_in_preludes_are_what_the_contract_renders() {
    for language in Language::ALL {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(language.path());
        let found = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(
            found == prelude(language),
            "{} is stale: run `cargo run --example render_contract`, then rebuild what includes it",
            language.path()
        );
    }
}
