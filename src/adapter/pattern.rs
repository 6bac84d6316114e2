//! PEFT's rule for which entry of `rank_pattern` or `alpha_pattern` a module takes, and which modules are targets.
//!
//! The rule of `get_pattern_key` (PEFT 0.21): the first key, in the file's order, for which
//! `re.match(r"(.*\.)?(KEY)$", module)` succeeds. A key is thus a Python regular expression, look-around included,
//! and a plain name matches from a dot on: `q_proj` matches `model.layers.0.self_attn.q_proj`, `proj` does not.

use fancy_regex::{Regex, RegexBuilder};
use indexmap::IndexMap;

/// Largest program that a pattern may compile to, in bytes: real ones are a thousandth of it.
const MAX_PROGRAM: usize = 1 << 20;
/// Steps of backtracking before a match is given up.
const MAX_STEPS: usize = 100_000;

/// A pattern that can't be compiled or takes too long: which one and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatternError {
    /// The pattern as the config writes it.
    pub pattern: String,
    /// What the regular expression engine says.
    pub reason: String,
}

impl std::fmt::Display for PatternError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "pattern {:?}: {}", super::json::excerpt(&self.pattern), self.reason)
    }
}

/// An expression that matches as Python's `re.match` or `re.fullmatch` would.
#[derive(Debug)]
pub(super) struct Pattern {
    source: String,
    /// Plain names, the usual case, need no engine.
    literal: bool,
    regex: Regex,
}

impl Pattern {
    /// `re.match(r"(.*\.)?(KEY)$", module)`
    pub fn suffix(key: &str) -> Result<Self, PatternError> {
        Self::compile(key, format!(r"\A(?:(.*\.)?({key})$)"))
    }

    /// `re.fullmatch(expression, module)`
    pub fn full(expression: &str) -> Result<Self, PatternError> {
        Self::compile(expression, format!(r"\A(?:{expression})\z"))
    }

    fn compile(source: &str, expression: String) -> Result<Self, PatternError> {
        let regex = RegexBuilder::new(&expression)
            .backtrack_limit(MAX_STEPS)
            .delegate_size_limit(MAX_PROGRAM)
            .delegate_dfa_size_limit(MAX_PROGRAM)
            .build()
            .map_err(|error| PatternError { pattern: source.to_owned(), reason: error.to_string() })?;
        let literal = !source.is_empty() && source.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        Ok(Self { source: source.to_owned(), literal, regex })
    }

    pub fn matches(&self, module: &str) -> Result<bool, PatternError> {
        if self.literal && self.regex.as_str().ends_with("$)") {
            return Ok(module.strip_suffix(&self.source).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')));
        }
        self.regex
            .is_match(module)
            .map_err(|error| PatternError { pattern: self.source.clone(), reason: error.to_string() })
    }
}

/// A `rank_pattern` or `alpha_pattern`, compiled.
#[derive(Debug)]
pub(super) struct Patterns<T>(Vec<(Pattern, T)>);

impl<T: Copy> Patterns<T> {
    pub fn compile(map: &IndexMap<String, T>) -> Result<Self, PatternError> {
        map.iter().map(|(key, value)| Ok((Pattern::suffix(key)?, *value))).collect::<Result<_, _>>().map(Self)
    }

    /// The value of the first key that matches.
    pub fn get(&self, module: &str) -> Result<Option<T>, PatternError> {
        for (pattern, value) in &self.0 {
            if pattern.matches(module)? {
                return Ok(Some(*value));
            }
        }
        Ok(None)
    }
}

/// Whether a list's entry names a module: the whole path, or its end from a dot on.
pub(super) fn names(entry: &str, module: &str) -> bool {
    module.strip_suffix(entry).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q: &str = "model.layers.0.self_attn.q_proj";

    fn matches(key: &str, module: &str) -> bool {
        Pattern::suffix(key).unwrap().matches(module).unwrap()
    }

    #[test]
    fn a_plain_key_matches_from_a_dot_on() {
        assert!(matches("q_proj", Q));
        assert!(matches("self_attn.q_proj", Q));
        assert!(!matches("proj", Q));
        assert!(!matches("q_proj", "model.q_proj.x"));
    }

    #[test]
    fn a_caret_pins_the_whole_path() {
        assert!(matches(r"^model\.layers\.0\..*", Q));
        assert!(!matches("^q_proj", Q));
        assert!(matches("^q_proj", "q_proj"));
    }

    #[test]
    fn an_alternation_is_grouped_as_a_whole() {
        assert!(matches("k_proj|q_proj", Q));
        assert!(!matches("k_proj|proj", Q));
    }

    #[test]
    fn look_around_works() {
        assert!(matches(r"(?<!vision\.)q_proj", Q));
        assert!(!matches(r"(?<!self_attn\.)q_proj", Q));
    }

    #[test]
    fn the_first_key_of_the_file_wins() {
        let map = IndexMap::from([("layers.0.self_attn.q_proj".to_owned(), 64), ("q_proj".to_owned(), 16)]);
        let patterns = Patterns::compile(&map).unwrap();
        assert_eq!(patterns.get(Q), Ok(Some(64)));
        assert_eq!(patterns.get("model.layers.1.self_attn.q_proj"), Ok(Some(16)));
        assert_eq!(patterns.get("model.layers.1.self_attn.k_proj"), Ok(None));
    }

    #[test]
    fn a_pattern_that_explodes_is_an_error_and_not_a_hang() {
        assert!(Pattern::suffix("(((a{1000}){1000}){1000}){1000}").is_err());
        let slow = Pattern::suffix(r"(?:(a|a)*)*(?!x)\1b").unwrap();
        assert!(slow.matches(&"a".repeat(60)).is_err());
    }
}
