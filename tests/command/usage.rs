//! Help, version, wrong usage, log output.

use std::process::Stdio;

use crate::{command, finish, fixture, lorapool};

const COMMANDS: [&str; 8] = ["run", "devices", "audit", "convert", "apply", "conform", "soak", "bench"];

#[test]
fn help_lists_every_command_and_each_one_has_examples() {
    let help = lorapool(["--help"]);
    assert_eq!((help.code, help.stderr.as_str()), (0, ""));
    for name in COMMANDS {
        assert!(help.stdout.contains(&format!("\n  {name}")), "{name}");
        for flag in ["--help", "-h"] {
            let help = lorapool([name, flag]);
            assert_eq!((help.code, help.stderr.as_str()), (0, ""), "{name}");
            assert!(help.stdout.contains(&format!("lorapool {name}")), "{name}: {}", help.stdout);
            assert!(help.stdout.contains("Examples:") && help.stdout.contains("--json"), "{name}: {}", help.stdout);
        }
    }
}

#[test]
fn long_help_says_what_a_command_does_and_short_help_does_not() {
    let said = [
        ("run", "synthetic input"),
        ("audit", "Frobenius norm"),
        ("convert", "read as data"),
        ("apply", "`SITE|y_base`"),
        ("conform", "f64 oracle"),
        ("soak", "Two threads"),
        ("bench", "the floor"),
    ];
    for (name, words) in said {
        // As on one line, however wide the terminal.
        let of = |flag| lorapool([name, flag]).stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(of("--help").contains(words) && !of("-h").contains(words), "{name}: {}", of("--help"));
    }
    assert!(lorapool(["--help"]).stdout.contains("Start with `lorapool run`"));
}

#[test]
fn files_are_looked_at_before_any_device() {
    for (code, args) in [
        ("E_NOT_FOUND", vec!["--adapter".to_owned(), "a=/nonexistent".to_owned()]),
        (
            "E_BASE_FILE",
            vec!["--base".to_owned(), fixture("05_r1"), "--adapter".to_owned(), format!("a={}", fixture("05_r1"))],
        ),
    ] {
        let ran = finish(
            command(["run", "--backend", "vulkan", "--json"])
                .args(args)
                .env("VK_DRIVER_FILES", "/nonexistent")
                .env("VK_ICD_FILENAMES", "/nonexistent"),
        );
        ran.fails(1, code, &[if code == "E_BASE_FILE" { "found an adapter" } else { "/nonexistent" }]);
    }
}

#[test]
fn version_names_the_crate_and_its_backends() {
    let version = lorapool(["--version"]);
    assert_eq!(version.code, 0);
    assert!(version.stdout.starts_with(&format!("lorapool {} (", env!("CARGO_PKG_VERSION"))), "{version:?}");
    assert!(version.stdout.contains("cpu"));
}

#[test]
fn wrong_usage_exits_with_2_and_says_what_is_wrong() {
    let adapter = format!("a={}", fixture("05_r1"));
    let wrong: [(&[&str], &str); 10] = [
        (&["devices", "--frobnicate"], "--frobnicate"),
        (&["frobnicate"], "frobnicate"),
        (&["audit"], "<ADAPTER>"),
        (&["run", "--backend", "metal"], "metal"),
        (&["run", "--rows", "0"], "--rows"),
        (&["run", "--dtype", "f64"], "f64"),
        (&["run", "--mix", "none"], "none"),
        (&["run", "--adapter", "no-equals-sign"], "NAME=PATH"),
        (&["run", "--adapter", &adapter, "--device", "0"], "--backend"),
        (&["run", "--adapter", &adapter, "--adapter", &adapter, "--backend", "cpu"], "\"a\""),
    ];
    for (args, word) in wrong {
        let ran = lorapool(args);
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{args:?}");
        assert!(ran.stderr.starts_with("error[E_USAGE]: ") && ran.stderr.contains(word), "{args:?}: {}", ran.stderr);
        let ran = lorapool(["--json"].iter().chain(args));
        ran.fails(2, "E_USAGE", &[word]);
        assert_eq!(ran.stderr, "", "{args:?}");
    }
    let none = command(None::<&str>).output().unwrap();
    assert_eq!(none.status.code(), Some(2));
    assert!(none.stdout.is_empty() && String::from_utf8(none.stderr).unwrap().contains("Usage: lorapool"));
}

#[test]
fn a_backend_without_driver_is_an_error_with_its_reason() {
    let mut run = command(["run", "--backend", "vulkan", "--json"]);
    let ran = finish(run.env("VK_DRIVER_FILES", "/nonexistent").env("VK_ICD_FILENAMES", "/nonexistent"));
    ran.fails(1, if cfg!(feature = "vulkan") { "E_UNAVAILABLE" } else { "E_INPUT" }, &["vulkan"]);
    lorapool(["run", "--backend", "cpu", "--device", "7", "--json"]).fails(1, "E_UNAVAILABLE", &["cpu", "7"]);
}

#[test]
fn log_output_goes_to_stderr_by_its_filter() {
    let case = fixture("05_r1");
    let run = |filter: &str| {
        let adapter = format!("a={case}");
        let args = ["run", "--backend", "cpu", "--adapter", &adapter, "--rows", "2", "--steps", "1", "--json"];
        finish(command(args).env("LORAPOOL_LOG", filter))
    };
    let quiet = run("warn");
    assert_eq!((quiet.code, quiet.stderr.as_str()), (0, ""));
    let loud = run("lorapool=info");
    assert!(loud.stderr.contains("INFO") && loud.stderr.contains("backend=\"cpu\""), "{}", loud.stderr);
    assert_eq!(loud.json()["mismatches"], 0);
    run("=,=").fails(2, "E_USAGE", &["LORAPOOL_LOG"]);
}

#[test]
fn piped_output_has_no_colour_and_a_closed_pipe_is_no_error() {
    let mut plain = command(["audit", &fixture("05_r1")]);
    let plain = finish(plain.env_remove("NO_COLOR").env("TERM", "xterm-256color"));
    assert_eq!(plain.code, 0);
    assert!(!plain.stdout.contains('\x1b') && plain.stdout.contains("accept"), "{plain:?}");
    let mut child = command(["audit", &fixture("05_r1"), "--json"]);
    let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}
