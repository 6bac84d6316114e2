//! JSON values that keep the file's key order and refuse a key that appears twice.
//!
//! `serde_json::Value` takes the last of two equal keys without a word; a config with `r` twice has no one meaning.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};

use super::reject::{Code, Loaded, Reject};

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    /// Whole numbers of 64 bits.
    Int(i64),
    Float(f64),
    String(Box<str>),
    Array(Box<[Json]>),
    /// In the file's order.
    Object(Box<[(Box<str>, Json)]>),
}

/// How much a file may make us allocate.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Bytes of the file.
    pub bytes: u64,
    /// Values in it, of about 24 bytes each.
    pub values: usize,
}

impl Json {
    /// Whether the value switches something on: not null, false, `{}` or `[]`.
    pub fn is_set(&self) -> bool {
        match self {
            Json::Null | Json::Bool(false) => false,
            Json::Array(items) => !items.is_empty(),
            Json::Object(items) => !items.is_empty(),
            _ => true,
        }
    }

    /// The value of a key of an object.
    pub fn get(&self, key: &str) -> Option<&Json> {
        match self {
            Json::Object(items) => items.iter().find(|(k, _)| &**k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// A whole number, also when written as `8.0`.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Json::Int(n) => Some(*n),
            Json::Float(x) if x.fract() == 0.0 && x.abs() < 9e15 => Some(*x as i64),
            _ => None,
        }
    }

    pub fn as_str(&self) -> Option<&str> {
        match self {
            Json::String(s) => Some(s),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Json::Bool(b) => Some(*b),
            _ => None,
        }
    }

    /// Reads the whole of `text`. `file` is for messages.
    pub fn parse(file: &str, text: &str, limits: Limits) -> Loaded<Json> {
        let left = Cell::new(limits.values);
        let duplicate = Cell::new(None);
        let mut reader = serde_json::Deserializer::from_str(text);
        let parsed = Seed { left: &left, duplicate: &duplicate }.deserialize(&mut reader).and_then(|value| {
            reader.end()?;
            Ok(value)
        });
        parsed.map_err(|error| {
            if left.get() == 0 {
                return Reject::new(Code::FileTooLarge, format!("{file}: more than {} JSON values", limits.values));
            }
            if let Some(key) = duplicate.take() {
                return Reject::new(
                    Code::ConfigDuplicate,
                    format!("{file}: key {key:?} appears twice (line {}); which one counts is ambiguous", error.line()),
                );
            }
            match not_a_number(text, &error) {
                Some((key, word)) if key.contains("alpha") => Reject::new(
                    Code::ConfigAlpha,
                    format!("{file}: {key} is {word}, expected a finite number (line {})", error.line()),
                ),
                Some((key, word)) => Reject::new(
                    Code::ConfigJson,
                    format!(
                        "{file}: {key} is {word}, which is not JSON; expected a finite number (line {})",
                        error.line()
                    ),
                ),
                None => Reject::new(Code::ConfigJson, format!("{file}: not valid JSON: {error}")),
            }
        })
    }
}

impl fmt::Display for Json {
    /// As in the file, shortened.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Null => f.write_str("null"),
            Json::Bool(b) => write!(f, "{b}"),
            Json::Int(n) => write!(f, "{n}"),
            Json::Float(x) => write!(f, "{x:?}"),
            Json::String(s) => write!(f, "{:?}", excerpt(s)),
            Json::Array(items) => match items.first() {
                None => f.write_str("[]"),
                Some(Json::Array(_) | Json::Object(_)) => write!(f, "a list of {}", items.len()),
                Some(first) if items.len() == 1 => write!(f, "[{first}]"),
                Some(first) => write!(f, "[{first}, ... {} in all]", items.len()),
            },
            Json::Object(items) => match items.first() {
                None => f.write_str("{}"),
                Some((key, _)) => write!(f, "{{{:?}: ...}}", excerpt(key)),
            },
        }
    }
}

/// The first 120 characters of untrusted text, for messages.
pub(super) fn excerpt(text: &str) -> String {
    let mut short: String = text.chars().take(120).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    short
}

/// Python writes NaN and Infinity where JSON has no word: the word at an error, and the key before it.
fn not_a_number<'a>(text: &'a str, error: &serde_json::Error) -> Option<(String, &'a str)> {
    let line_at: usize = text.split_inclusive('\n').take(error.line().checked_sub(1)?).map(str::len).sum();
    let line = text.get(line_at..)?;
    let at = line.char_indices().map(|(i, _)| i).take_while(|i| *i < error.column()).last().unwrap_or(0);
    let (before, word) = ["-Infinity", "Infinity", "NaN"].into_iter().find_map(|word| {
        // The error points at the word's first letters.
        let from = line[..at].char_indices().rev().take(2).last().map_or(0, |(i, _)| i);
        let found = line.get(from..)?.find(word).filter(|offset| *offset <= 4)?;
        Some((&text[..line_at + from + found], &line[from + found..from + found + word.len()]))
    })?;
    let key = before.trim_end().strip_suffix(':')?.trim_end().strip_suffix('"')?;
    Some((excerpt(&key[key.rfind('"')? + 1..]), word))
}

/// Counts down the values left, and keeps the key that came twice.
#[derive(Clone, Copy)]
struct Seed<'a> {
    left: &'a Cell<usize>,
    duplicate: &'a Cell<Option<String>>,
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Json;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        match self.left.get().checked_sub(1) {
            Some(left) if left > 0 => self.left.set(left),
            _ => {
                self.left.set(0);
                return Err(D::Error::custom("too many values"));
            }
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Int(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(i64::try_from(value).map_or(Json::Float(value as f64), Json::Int))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Float(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::String(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Json::Array(items.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
        let mut items: Vec<(Box<str>, Json)> = Vec::new();
        let mut seen = HashSet::new();
        while let Some(key) = access.next_key::<Box<str>>()? {
            if !seen.insert(key.clone()) {
                self.duplicate.set(Some(excerpt(&key)));
                return Err(A::Error::custom("duplicate key"));
            }
            let value = access.next_value_seed(self)?;
            items.push((key, value));
        }
        Ok(Json::Object(items.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { bytes: 1 << 20, values: 100 };

    fn code(text: &str) -> (Code, String) {
        let reject = Json::parse("f.json", text, LIMITS).unwrap_err();
        (reject.code, reject.message)
    }

    #[test]
    fn a_key_that_appears_twice_is_refused_at_any_depth() {
        assert_eq!(code(r#"{"r": 1, "a": 2, "r": 4}"#).0, Code::ConfigDuplicate);
        assert_eq!(code(r#"{"p": {"q": 1, "\u0071": 4}}"#).0, Code::ConfigDuplicate);
        assert!(Json::parse("f.json", r#"{"a": {"r": 1}, "b": {"r": 1}}"#, LIMITS).is_ok());
    }

    #[test]
    fn a_nan_is_named_with_its_key() {
        let (code_, message) = code("{\n  \"r\": 1,\n  \"lora_alpha\": NaN\n}");
        assert_eq!(code_, Code::ConfigAlpha);
        assert!(message.contains("lora_alpha is NaN"), "{message}");
        assert_eq!(code(r#"{"lora_alpha": -Infinity}"#).0, Code::ConfigAlpha);
        assert_eq!(code(r#"{"lora_dropout":Infinity}"#).0, Code::ConfigJson);
        assert_eq!(code(r#"{"é": nope, "lora_alpha": NaN}"#).0, Code::ConfigJson);
    }

    #[test]
    fn values_and_depth_are_bounded() {
        assert_eq!(code(&format!("[{}0]", "0,".repeat(200))).0, Code::FileTooLarge);
        assert_eq!(code(&"[".repeat(5000)).0, Code::FileTooLarge);
        let deep = Limits { values: 1 << 20, ..LIMITS };
        assert_eq!(Json::parse("f", &"[".repeat(5000), deep).unwrap_err().code, Code::ConfigJson);
    }

    #[test]
    fn order_is_the_files() {
        let json = Json::parse("f", r#"{"b": 1, "a": 2.0}"#, LIMITS).unwrap();
        let Json::Object(items) = &json else { panic!() };
        assert_eq!(&*items[0].0, "b");
        assert_eq!(json.get("a").and_then(Json::as_int), Some(2));
    }
}
