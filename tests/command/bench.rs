//! `lorapool bench`

use crate::{backends, fixtures, lorapool};

/// One layer and few replays: the numbers mean nothing here, their document does.
const SHORT: [&str; 6] = ["--layers", "1", "--replays", "2", "--json", "--backend"];

#[test]
fn bench_times_named_cases_beside_their_floor_on_every_required_backend() {
    for backend in backends() {
        let ran =
            lorapool(["bench", "--case", "1x1-r16", "--case", "4x4-r16"].iter().chain(&SHORT).chain(&[&*backend]));
        assert_eq!(ran.code, 0, "{ran:?}");
        let document = ran.json();
        let lines = document["results"].as_array().unwrap();
        assert_eq!(lines.iter().map(|line| &line["name"]).collect::<Vec<_>>(), ["1x1-r16", "4x4-r16"]);
        for line in lines {
            assert!(line["median_us"].as_f64() > Some(0.0) && line["floor_us"].as_f64() > Some(0.0), "{line}");
            // Where the base's own products can't be timed, the document says why.
            assert_eq!(line["base_us"].is_null(), document["no_base"].is_string(), "{document}");
        }
        assert!(document["copy_bytes_per_second"].as_f64() > Some(0.0));
    }
}

#[test]
fn bench_says_which_linears_of_a_base_it_does_not_time() {
    let base = fixtures().join("_base/mixtral");
    let own = ["bench", "--rows", "2", "--rank", "4", "--backend", "cpu", "--replays", "2", "--base"];
    let ran = lorapool(own.iter().map(|word| word.as_ref()).chain([base.as_os_str()]).chain(["--json".as_ref()]));
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.json()["experts_left_out"].as_u64() > Some(0), "{ran:?}");
    let text = lorapool(own.iter().map(|word| word.as_ref()).chain([base.as_os_str()]));
    assert!(text.stdout.contains("not in these times:"), "{text:?}");
}

#[test]
fn bench_times_swaps_beside_a_bare_copy_and_the_step_beside_swaps() {
    for backend in backends() {
        let ran = lorapool(["bench", "--swap", "--case", "1x1-r16"].iter().chain(&SHORT).chain(&[&*backend]));
        assert_eq!(ran.code, 0, "{ran:?}");
        let document = ran.json();
        // Seven sites of one layer at rank 16, two bytes an element.
        assert_eq!(document["slot_bytes"], 16 * 2 * (4 * 4096 + 2 * 1024 + 4096 + 4096 * 3 + 14336 * 3 + 4096));
        let swaps = document["results"].as_array().unwrap();
        assert_eq!(swaps.iter().map(|line| &line["verify"]).collect::<Vec<_>>(), [false, true]);
        for line in swaps {
            assert!(line["share_of_copy"].as_f64() > Some(0.0), "{line}");
            assert!(line["step_meanwhile"]["samples"].as_u64() > Some(2), "{line}");
        }
    }
}

#[test]
fn bench_draws_its_cases() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plot.svg");
    let plot = ["bench", "--case", "1x1-r16", "--case", "4x4-r16", "--plot", file.to_str().unwrap()];
    let ran = lorapool(plot.iter().chain(&SHORT).chain(&["cpu"]));
    assert_eq!(ran.code, 0, "{ran:?}");
    let drawing = std::fs::read_to_string(&file).unwrap();
    assert!(drawing.starts_with("<svg") && drawing.contains("rank 16, one adapter") && drawing.contains("<circle"));
    let nowhere = dir.path().join("missing/plot.svg");
    let plot = ["bench", "--case", "1x1-r16", "--plot", nowhere.to_str().unwrap()];
    lorapool(plot.iter().chain(&SHORT).chain(&["cpu"])).fails(1, "E_IO", &["missing/plot.svg"]);
}

#[test]
fn bench_names_its_cases_and_knows_no_others() {
    let names = lorapool(["bench", "--list", "--json"]).json();
    assert!(names.as_array().unwrap().contains(&"64x64-r16".into()));
    lorapool(["bench", "--case", "no-such-case", "--json"]).fails(2, "E_USAGE", &["no-such-case", "--list"]);
}

#[test]
fn bench_tunes_by_timing_every_variant_beside_the_chosen_one() {
    for backend in backends() {
        let ran = lorapool(["bench", "--tune", "--case", "1x1-r16"].iter().chain(&SHORT).chain(&[&*backend]));
        assert_eq!(ran.code, 0, "{ran:?}");
        let document = ran.json();
        let line = &document["results"][0];
        assert!(line["chosen_us"].as_f64() > Some(0.0), "{document}");
        let variants = document["variants"].as_array().unwrap();
        assert_eq!(line["variants_us"].as_object().unwrap().len(), variants.len());
    }
}
