//! Other drivers than the one at hand: none at all, a missing layer, and SwiftShader, which lacks every optional
//! feature. Drivers are chosen by the environment, so each runs in a process of its own: this file's tests again.
#![cfg(feature = "vulkan")]

use std::path::Path;
use std::process::Command;

use lorapool::backend::vulkan::{VulkanBackend, devices};
use lorapool::conformance;

const CHILD: &str = "LORAPOOL_TEST_CHILD";
/// Where Debian's chromium keeps SwiftShader.
const SWIFTSHADER: &str = "/usr/lib/chromium/vk_swiftshader_icd.json";

/// In the child: `true`. Otherwise runs test `name` in a child with `environment`, and its failure is ours.
fn in_child(name: &str, environment: &[(&str, &str)]) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let output = [run.stdout, run.stderr].concat();
    let output = String::from_utf8_lossy(&output);
    assert!(run.status.success() && output.contains("1 passed"), "{:?}\n{output}", run.status);
    false
}

#[test]
fn without_a_driver_the_backend_is_unavailable_with_the_reason() {
    let none = [("VK_DRIVER_FILES", "/nonexistent.json"), ("VK_ICD_FILENAMES", "/nonexistent.json")];
    if in_child("without_a_driver_the_backend_is_unavailable_with_the_reason", &none) {
        for error in [devices().unwrap_err(), VulkanBackend::open(0).unwrap_err()] {
            assert_eq!(error.code(), "E_UNAVAILABLE");
            let message = error.to_string();
            assert!(message.contains("driver") || message.contains("loader"), "{message}");
        }
        let listing = lorapool::backend::list().into_iter().find(|listing| listing.backend == "vulkan").unwrap();
        assert!(listing.devices.is_empty() && listing.unavailable.is_some());
    }
}

#[test]
fn validation_without_its_layer_is_an_error_that_names_the_layer() {
    let environment = [("LORAPOOL_VULKAN_VALIDATION", "1"), ("VK_LAYER_PATH", "/nonexistent")];
    if in_child("validation_without_its_layer_is_an_error_that_names_the_layer", &environment) {
        let error = VulkanBackend::open(0).unwrap_err();
        assert_eq!(error.code(), "E_UNAVAILABLE");
        let message = error.to_string();
        assert!(message.contains("VK_LAYER_KHRONOS_validation") || message.contains("loader"), "{message}");
    }
}

#[test]
fn a_driver_without_any_optional_feature_gives_the_same_numbers() {
    if !Path::new(SWIFTSHADER).exists() {
        println!("skipped: SwiftShader is not installed ({SWIFTSHADER}, from Debian's chromium)");
        return;
    }
    let environment = [("VK_DRIVER_FILES", SWIFTSHADER), ("VK_ICD_FILENAMES", SWIFTSHADER)];
    if in_child("a_driver_without_any_optional_feature_gives_the_same_numbers", &environment) {
        let backend = VulkanBackend::open(0).unwrap();
        let report = conformance::smoke(&backend);
        assert!(report.failures.is_empty(), "{report:?}");
        assert!(report.device.contains("SwiftShader"), "{report:?}");
    }
}
