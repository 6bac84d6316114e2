//! `lorapool devices`

use crate::{backends, lorapool};

#[test]
fn every_backend_has_devices_or_a_reason() {
    let ran = lorapool(["devices", "--json"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let document = ran.json();
    let listed = document["backends"].as_array().unwrap();
    for backend in listed {
        let devices = backend["devices"].as_array().unwrap();
        assert_eq!(devices.is_empty(), backend["unavailable"].is_string(), "{backend}");
        for device in devices {
            assert_eq!(device["backend"], backend["backend"]);
            for field in ["device", "driver", "api", "class"] {
                assert!(device[field].as_str().is_some_and(|text| !text.is_empty()), "{field} of {device}");
            }
            assert!(device["max_alloc"].as_u64().is_some_and(|limit| limit > 0), "{device}");
        }
    }
    for name in backends() {
        let backend = listed.iter().find(|listed| listed["backend"] == name.as_str());
        assert!(backend.is_some_and(|backend| backend["unavailable"].is_null()), "{name} in {document}");
    }
    assert!(document["auto"]["backend"].is_string());
}

#[test]
fn the_text_names_each_device_and_the_one_that_auto_takes() {
    let ran = lorapool(["devices"]);
    assert_eq!(ran.code, 0);
    assert!(ran.stdout.lines().any(|line| line.starts_with("cpu 0  ")), "{}", ran.stdout);
    assert!(ran.stdout.contains("--backend auto takes "), "{}", ran.stdout);
}
