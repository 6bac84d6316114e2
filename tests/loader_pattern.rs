//! PEFT's pattern rule on random patterns and modules, against a matcher that knows no regular expressions.

use lorapool::adapter::PeftAdapterConfig;
use proptest::prelude::*;

/// `re.match(r"(.*\.)?(KEY)$", module)` for keys of letters, dots (any character) and a leading caret, naively.
fn naive(key: &str, module: &str) -> bool {
    let (pinned, key) = match key.strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, key),
    };
    let starts = (0..=module.len()).filter(|at| *at == 0 || (!pinned && module.as_bytes()[at - 1] == b'.'));
    starts.into_iter().any(|at| {
        let rest = &module.as_bytes()[at..];
        rest.len() == key.len() && rest.iter().zip(key.bytes()).all(|(m, k)| k == b'.' || *m == k)
    })
}

fn name() -> impl Strategy<Value = String> {
    proptest::collection::vec("[ab]{1,2}|[01]", 1..5).prop_map(|segments| segments.join("."))
}

fn key() -> impl Strategy<Value = String> {
    (any::<bool>(), name()).prop_map(|(pinned, name)| if pinned { format!("^{name}") } else { name })
}

proptest! {
    #[test]
    fn the_first_match_in_the_files_order_decides(
        keys in proptest::collection::vec((key(), 1usize..100), 0..5),
        alphas in proptest::collection::vec((key(), 1u32..100), 0..5),
        module in name(),
        use_rslora in any::<bool>(),
    ) {
        let rank_pattern: indexmap::IndexMap<String, usize> = keys.into_iter().collect();
        let alpha_pattern: indexmap::IndexMap<String, f64> = alphas.into_iter().map(|(k, a)| (k, a.into())).collect();
        let rank = rank_pattern.iter().find(|(k, _)| naive(k, &module)).map_or(8, |(_, r)| *r);
        let alpha = alpha_pattern.iter().find(|(k, _)| naive(k, &module)).map_or(8.0, |(_, a)| *a);
        let scale = if use_rslora { alpha / (rank as f64).sqrt() } else { alpha / rank as f64 };
        let config = PeftAdapterConfig { rank_pattern, alpha_pattern, use_rslora, ..PeftAdapterConfig::default() };
        prop_assert_eq!(config.scales().unwrap().of(&module).unwrap(), (rank, scale));
    }

    #[test]
    fn any_pattern_compiles_or_is_an_error(key in ".{0,40}", module in "[a-z0-9.]{0,40}") {
        let rank_pattern = [(key, 4)].into_iter().collect();
        let config = PeftAdapterConfig { rank_pattern, ..PeftAdapterConfig::default() };
        if let Ok(scales) = config.scales() {
            let _ = scales.of(&module);
        }
    }
}
