//! Without an NVIDIA driver, or with one that has no device or is too old, the backend is listed with the reason.
//!
//! Each case runs this program again with a library of its own named libcuda in front of any real one.
#![cfg(all(feature = "cuda", target_os = "linux"))]

use std::path::Path;
use std::process::Command;

use lorapool::backend::{list, open};

/// Set for the program that looks for devices.
const CHILD: &str = "LORAPOOL_TEST_LISTS_CUDA";
const START: &str = "cuda: ";

#[test]
fn child_that_lists_the_cuda_backend() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let listing = list().into_iter().find(|l| l.backend == "cuda").expect("the cuda backend is in this build");
    assert!(listing.devices.is_empty());
    let error = open("cuda", 0).expect_err("no device to open");
    assert_eq!(error.code(), "E_UNAVAILABLE");
    let reason = listing.unavailable.expect("a reason");
    assert!(error.to_string().ends_with(&reason), "{error} / {reason}");
    println!("{START}{reason}");
}

/// What the backend says with `source`, in C, as the driver's library; `None` without a C compiler.
fn reason_with(source: &str) -> Option<String> {
    let home = tempfile::tempdir().expect("a temporary folder");
    let code = home.path().join("driver.c");
    std::fs::write(&code, source).expect("a writable folder");
    for name in ["libcuda.so", "libcuda.so.1"] {
        let compiler =
            Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(home.path().join(name)).arg(&code).output();
        let Ok(compiler) = compiler else {
            eprintln!("skipped: no C compiler named cc");
            return None;
        };
        assert!(compiler.status.success(), "{}", String::from_utf8_lossy(&compiler.stderr));
    }
    Some(reason_in(home.path()))
}

/// What the backend says with the libraries in `folder`.
fn reason_in(folder: &Path) -> String {
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "child_that_lists_the_cuda_backend", "--nocapture"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", folder)
        .output()
        .expect("this program runs");
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{output}{}", String::from_utf8_lossy(&child.stderr));
    let reason = output.lines().find_map(|line| line.split_once(START)).expect("the child prints the reason");
    reason.1.to_owned()
}

#[test]
fn a_driver_without_a_device_is_named_by_the_driver_s_own_words() {
    let reason = reason_with(
        r#"
        int cuInit(unsigned flags) { return 100; }
        int cuGetErrorName(int e, const char **s) { *s = "CUDA_ERROR_NO_DEVICE"; return 0; }
        int cuGetErrorString(int e, const char **s) { *s = "no CUDA-capable device is detected"; return 0; }
        "#,
    );
    assert!(reason.is_none_or(|r| r == "cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"));
}

#[test]
fn a_driver_without_a_device_and_without_words_is_named_too() {
    let reason = reason_with("int cuInit(unsigned flags) { return 100; }");
    assert!(reason.is_none_or(|r| r.contains("no CUDA-capable device")));
}

#[test]
fn an_error_that_the_driver_has_no_words_for_is_named_by_its_number() {
    let reason = reason_with(
        r#"
        int cuInit(unsigned flags) { return 999; }
        int cuGetErrorName(int e, const char **s) { *s = 0; return 1; }
        int cuGetErrorString(int e, const char **s) { *s = 0; return 1; }
        "#,
    );
    assert!(reason.is_none_or(|r| r == "cuInit: error 999"));
}

#[test]
fn a_driver_that_lacks_a_function_is_too_old_and_not_a_panic() {
    let reason = reason_with("int cuInit(unsigned flags) { return 0; }");
    assert!(reason.is_none_or(|r| r.contains("the driver has no cu") && r.contains("CUDA 12.0")));
}

#[test]
fn a_library_that_is_no_driver_is_said_to_be_none() {
    let reason = reason_with("int nothing;");
    assert!(reason.is_none_or(|r| r.contains("has no cuInit")));
}
