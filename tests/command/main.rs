//! The command as its users start it: the real binary, its exit codes, its stdout and stderr.
//!
//! `REQUIRE_BACKENDS=cpu,vulkan,webgpu` names the backends that the numeric tests run on; without it, the CPU.

mod apply;
mod apply_errors;
mod audit;
mod bench;
mod convert;
mod devices;
mod experts;
mod run;
mod suites;
mod usage;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// What a run of the command left.
#[derive(Debug)]
pub struct Ran {
    /// Exit code.
    pub code: i32,
    /// All of stdout.
    pub stdout: String,
    /// All of stderr.
    pub stderr: String,
}

impl Ran {
    /// The one JSON document on stdout.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error} in {self:?}"))
    }

    /// Checks a failure in JSON mode: exit code, the error's code, and words of its message.
    #[track_caller]
    pub fn fails(&self, code: i32, error: &str, words: &[&str]) {
        let document = self.json();
        let (found, message) = (&document["error"]["code"], document["error"]["message"].as_str().unwrap_or_default());
        assert_eq!((self.code, found.as_str()), (code, Some(error)), "{self:?}");
        for word in words {
            assert!(message.contains(word), "{word:?} is not in {message:?}");
        }
        assert!(!self.stderr.contains("panicked"), "{self:?}");
    }
}

/// Runs the command with these arguments.
pub fn lorapool<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Ran {
    finish(&mut command(args))
}

/// The command, not yet started.
pub fn command<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lorapool"));
    command.args(args).env_remove("LORAPOOL_LOG").env("NO_COLOR", "");
    command
}

/// Runs a command to its end.
pub fn finish(command: &mut Command) -> Ran {
    let output = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code().unwrap(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Backends that numeric tests run on.
pub fn backends() -> Vec<String> {
    let names = std::env::var("REQUIRE_BACKENDS").unwrap_or_else(|_| "cpu".into());
    names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// The fixtures' directory.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// A path below the fixtures' directory, as an argument.
pub fn fixture(path: &str) -> String {
    fixtures().join(path).display().to_string()
}

/// `NAME=PATH` of a fixture.
pub fn named(name: &str, path: &str) -> String {
    format!("{name}={}", fixture(path))
}

/// The fixtures' cases: name and base.
pub fn cases() -> Vec<(String, String)> {
    let index = std::fs::read_to_string(fixtures().join("INDEX.json")).unwrap();
    let index: Value = serde_json::from_str(&index).unwrap();
    let case = |(name, about): (&String, &Value)| (name.clone(), format!("_base/{}", about["base"].as_str().unwrap()));
    index.as_object().unwrap().iter().map(case).collect()
}
