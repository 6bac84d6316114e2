//! Why an adapter is refused: one stable code per kind of fault.

use std::fmt;

/// Kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Code {
    /// in work
    Placeholder,
}

impl Code {
    /// The stable string.
    pub fn as_str(self) -> &'static str {
        "E_PLACEHOLDER"
    }
}

/// A refusal: what was found where, what was expected.
#[derive(Clone, Debug)]
pub struct Reject {
    /// Kind of fault.
    pub code: Code,
    /// What was found where, what was expected.
    pub message: String,
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.as_str(), self.message)
    }
}

impl std::error::Error for Reject {}
