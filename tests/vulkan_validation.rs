//! Everything the Vulkan backend does, under the Khronos validation layer: not one message.
#![cfg(feature = "vulkan")]

use std::process::Command;

use lorapool::backend::vulkan::{VulkanBackend, devices, validation_installed, validation_messages};
use lorapool::backend::{GpuBackend, Graph};
use lorapool::conformance;

const SWITCH: &str = "LORAPOOL_VULKAN_VALIDATION";
const NAME: &str = "no_call_of_the_backend_draws_a_message_from_the_validation_layer";

fn required() -> bool {
    let required = std::env::var("REQUIRE_BACKENDS").unwrap_or_default();
    required.split(',').any(|name| name.trim() == "vulkan")
}

/// The layer is switched on by the environment, so the work runs in a process of its own: this test again.
#[test]
fn no_call_of_the_backend_draws_a_message_from_the_validation_layer() {
    if std::env::var_os(SWITCH).is_some_and(|value| value == "1") {
        return validated();
    }
    for (missing, what) in [
        (!validation_installed(), "the validation layer is not installed".to_owned()),
        (devices().is_err(), format!("{:?}", devices().err())),
    ] {
        if missing {
            assert!(!required(), "vulkan is required, but {what}");
            println!("skipped: {what}");
            return;
        }
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args([NAME, "--exact", "--nocapture"])
        .env(SWITCH, "1")
        .output()
        .unwrap();
    let output = [run.stdout, run.stderr].concat();
    let output = String::from_utf8_lossy(&output);
    assert!(run.status.success() && output.contains("1 passed"), "{output}");
}

fn validated() {
    #[cfg(feature = "cli")]
    tracing_subscriber::fmt().with_env_filter("error").with_ansi(false).init();
    let backend = VulkanBackend::open(0).unwrap();

    let report = conformance::smoke(&backend);
    assert!(report.failures.is_empty(), "{report:?}");

    let (a, b) = (backend.alloc(1 << 20, "a").unwrap(), backend.alloc(1 << 20, "b").unwrap());
    let graph: Box<dyn Graph> = backend
        .capture(&mut |encoder| {
            encoder.write(&a, &[1; 4096])?;
            encoder.copy(&b, &a)
        })
        .unwrap();
    for _ in 0..10 {
        graph.replay().unwrap();
    }
    assert!(backend.submit(&mut |encoder| encoder.write(&a, &[0; 3])).is_err());
    assert_eq!(backend.read(&b.slice(4095, 2).unwrap()).unwrap(), [1, 0]);
    // Still pending when everything goes.
    backend.submit(&mut |encoder| encoder.write(&a, &vec![7; 1 << 20])).unwrap();
    graph.replay().unwrap();
    drop((a, graph, backend, b));

    assert_eq!(validation_messages(), 0, "the messages are above");
}
