//! Why a command failed, in the form that people and scripts get it.

use lorapool::Error;

/// How a command ends. The numbers are its exit codes and stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// Done, and right.
    Done = 0,
    /// Something failed, or a result was wrong.
    Failed = 1,
    /// The command line makes no sense, or `audit` refuses the adapter.
    Refused = 2,
}

/// An error with a stable code.
#[derive(Debug)]
pub struct Failure {
    code: &'static str,
    message: String,
    status: Status,
}

impl Failure {
    /// A command line that makes no sense.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { code: "E_USAGE", message: message.into(), status: Status::Refused }
    }

    /// A file that can't be read or written.
    pub fn io(path: impl std::fmt::Display, source: std::io::Error) -> Self {
        Error::Io { path: path.to_string(), source }.into()
    }

    /// Names what the error is about: an adapter, a file.
    pub fn about(mut self, subject: impl std::fmt::Display) -> Self {
        self.message = format!("{subject}: {}", self.message);
        self
    }

    /// The stable code.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// What happened, without the code.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The exit code.
    pub fn status(&self) -> Status {
        self.status
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let message = match &error {
            Error::Reject(reject) => reject.message.clone(),
            other => other.to_string(),
        };
        Self { code: error.code(), message, status: Status::Failed }
    }
}
