//! `lorapool conform` and `lorapool soak`

use crate::{backends, lorapool};

#[test]
fn conform_lists_its_cases_and_runs_those_that_are_asked_for() {
    let names = lorapool(["conform", "--list", "--json"]).json();
    let names = names.as_array().unwrap();
    assert!(names.len() > 100, "{}", names.len());
    let filter = "bgmv[bf16xbf16";
    let wanted = names.iter().filter(|name| name.as_str().unwrap().contains(filter)).count();
    assert!(wanted > 0);
    let ran = lorapool(["conform", "--backend", "cpu", "--filter", filter, "--json"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let document = ran.json();
    assert_eq!((&document["backend"], &document["failed"]), (&"cpu".into(), &0.into()));
    assert_eq!(document["cases"].as_u64().unwrap() as usize + document["ignored"].as_array().unwrap().len(), wanted);
    assert!(document["elements_checked"].as_u64() > Some(0));
    for field in ["version", "platform", "device", "driver", "api"] {
        assert!(document[field].as_str().is_some_and(|text| !text.is_empty()), "{field}");
    }
    let ran = lorapool(["conform", "--backend", "cpu", "--filter", filter]);
    assert!(ran.stdout.lines().last().unwrap().starts_with(&format!("ok {wanted} cases")), "{}", ran.stdout);
    lorapool(["conform", "--filter", "no such case", "--json"]).fails(2, "E_USAGE", &["no such case"]);
}

#[test]
fn a_short_soak_ends_clean_on_every_required_backend() {
    for backend in backends() {
        let ran = lorapool(["soak", "--backend", &backend, "--seconds", "1", "--json"]);
        assert_eq!(ran.code, 0, "{ran:?}");
        let document = ran.json();
        assert_eq!((&document["mismatches"], &document["leases_left"]), (&0.into(), &0.into()), "{document}");
        assert!(document["rows_checked"].as_u64() > Some(0), "{document}");
    }
}
