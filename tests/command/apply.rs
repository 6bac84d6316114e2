//! `lorapool apply` against PEFT's own outputs.

use std::path::Path;

use lorapool::DType;
use lorapool::adapter::{Adapter, BaseModel, HostPair, RowVectors, load};
use lorapool::conformance::oracle::{Check, Expected, Oracle, Pair};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::{backends, cases, fixture, fixtures, lorapool};

/// A tensor's values, whatever its type.
fn values(file: &SafeTensors<'_>, name: &str) -> Vec<f64> {
    let tensor = file.tensor(name).unwrap();
    let bytes = tensor.data();
    match tensor.dtype() {
        Dtype::F64 => bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b).into()).collect(),
        Dtype::I64 => bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b) as f64).collect(),
        other => panic!("{name} is {other:?}"),
    }
}

fn narrow(values: Vec<f64>) -> Vec<f32> {
    values.into_iter().map(|value| value as f32).collect()
}

/// Of the bases whose fixtures have tables of tokens.
const VOCABULARY: usize = 131;

/// Checks every `SITE|y` in `output` against PEFT's y in `expected`, within the bound of f32 arithmetic.
///
/// `slots`: the index in `adapters` of each row's adapter.
fn check(case: &str, adapters: &[Adapter], slots: Option<&[i64]>, expected: &[u8], output: &[u8]) -> (Check, usize) {
    let (expected, output) = (SafeTensors::deserialize(expected).unwrap(), SafeTensors::deserialize(output).unwrap());
    let mut check = Check::default();
    for name in output.names() {
        let site = name.strip_suffix("|y").unwrap();
        let base = format!("{site}|y_base");
        let tensor = output.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::F32);
        assert_eq!(tensor.shape(), expected.tensor(name).unwrap().shape(), "{case}: {name}");
        let width = *tensor.shape().last().unwrap();
        let base = narrow(values(&expected, &base));
        let ids = expected.tensor(&format!("{site}|ids")).is_ok().then(|| values(&expected, &format!("{site}|ids")));
        let (peft, got) = (values(&expected, name), narrow(values(&output, name)));
        let rows = got.len() / width;
        // A token is a row with a 1 in its column.
        let x = match &ids {
            None => narrow(values(&expected, &format!("{site}|x"))),
            Some(ids) => {
                ids.iter().flat_map(|id| (0..VOCABULARY).map(move |column| f32::from(column as f64 == *id))).collect()
            }
        };
        let depth = x.len() / rows;
        for row in 0..rows {
            let at = row * width..(row + 1) * width;
            let slot = slots.map_or(0, |slots| slots[row]);
            let adapter = usize::try_from(slot).ok().map(|slot| &adapters[slot]);
            let pair = adapter.and_then(|adapter| adapter.pairs.iter().find(|pair| &*pair.site.path == site));
            let want = peft[at.clone()].to_vec();
            let tokens = adapter.and_then(|adapter| adapter.tokens.iter().find(|t| &*t.site.path == site));
            let mut bound: Vec<f64> = match pair {
                Some(pair) => {
                    let values =
                        |matrix: &lorapool::adapter::HostMatrix| DType::F32.decode(&matrix.to(DType::F32).unwrap());
                    let (a, b) = (values(&pair.a), values(&pair.b));
                    let pair_view = Pair { a: &a, b: &b, rank: pair.rank(), in_features: depth, out_features: width };
                    let oracle = Oracle::new(pair_view, &x[row * depth..(row + 1) * depth]);
                    let vectors = pair.vectors.as_ref().map(RowVectors::slices);
                    let scales = [pair.scale.into(), 1.0];
                    oracle.expand_shaped(&base[at.clone()], scales, vectors, DType::F32, None).bound
                }
                // y_base was f64 and is f32 now.
                None => want.iter().map(|value| DType::F32.ulp(*value) / 2.0).collect(),
            };
            if let (Some(tokens), None) = (tokens, &ids) {
                // A replaced logit is a sum of as many products as x has elements.
                let weights = DType::F32.decode(&tokens.rows.to(DType::F32).unwrap());
                for (id, weights) in tokens.ids.iter().zip(weights.chunks(depth)) {
                    let terms = weights.iter().zip(&x[row * depth..]).map(|(w, x)| f64::from((w * x).abs()));
                    bound[*id as usize] += (depth + 1) as f64 * f64::from(f32::EPSILON) * terms.sum::<f64>();
                }
            }
            check.row(&format!("{case} {site}"), row, DType::F32, &Expected { want, bound }, &got[at]);
        }
    }
    (check, output.len())
}

/// Cases with PEFT's outputs that the loader accepts.
fn accepted() -> Vec<(String, String, Adapter)> {
    let load = |(case, base): (String, String)| {
        let has_outputs = fixtures().join(&case).join("expected.safetensors").exists();
        let model = BaseModel::open(fixtures().join(&base)).unwrap();
        let adapter = load(fixtures().join(&case), Some(&model)).ok()?;
        // Of experts alone: `experts` applies those.
        (has_outputs && (!adapter.pairs.is_empty() || adapter.experts.is_empty())).then_some((case, base, adapter))
    };
    cases().into_iter().filter_map(load).collect()
}

/// The file of expected outputs without the sites that the adapter has no pair for: a head that the host applies
/// itself has an x there too.
fn only(adapter: &Adapter, path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let pairs = adapter.pairs.iter().map(|pair| &*pair.site.path);
    let sites: Vec<&str> = pairs.chain(adapter.tokens.iter().map(|tokens| &*tokens.site.path)).collect();
    let unwanted = |name: &str| match name.rsplit_once('|') {
        Some((site, "x" | "ids")) => !sites.contains(&site),
        _ => false,
    };
    let tensors = file.tensors();
    safetensors::serialize(tensors.into_iter().filter(|(name, _)| !unwanted(name)), None).unwrap()
}

#[test]
fn every_accepted_fixture_gets_pefts_own_outputs_on_every_required_backend() {
    let dir = tempfile::tempdir().unwrap();
    let cases = accepted();
    assert!(cases.len() >= 17, "{}", cases.len());
    for backend in backends() {
        for (case, base, adapter) in &cases {
            let (input, output) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
            let expected = only(adapter, &fixtures().join(case).join("expected.safetensors"));
            std::fs::write(&input, &expected).unwrap();
            for op in ["bgmv", "sgmv"] {
                let (base, named) = (fixture(base), format!("it={}", fixture(case)));
                let (from, to) = (input.display().to_string(), output.display().to_string());
                let args = ["apply", "--base", &base, "--adapter", &named, "--input", &from, "--output", &to];
                let ran = lorapool(args.into_iter().chain(["--backend", &backend, "--op", op, "--json"]));
                assert_eq!(ran.code, 0, "{case} on {backend}: {ran:?}");
                let adapters = std::slice::from_ref(adapter);
                let (check, sites) = check(case, adapters, None, &expected, &std::fs::read(&output).unwrap());
                let file = SafeTensors::deserialize(&expected).unwrap();
                let covered = |pair: &&HostPair| {
                    ["x", "ids"].iter().any(|part| file.tensor(&format!("{}|{part}", pair.site.path)).is_ok())
                };
                let pairs = adapter.pairs.iter().filter(covered).count();
                assert_eq!(sites, pairs + adapter.tokens.len(), "{case}");
                assert!(check.passed(), "{case} {op} on {backend}: {:?}", check.first);
                assert_eq!(ran.json()["adapters"][0]["applied"], sites, "{case}");
                std::fs::remove_file(&output).unwrap();
            }
        }
    }
}

#[test]
fn the_mixed_batch_of_seven_adapters_is_pefts_row_by_row() {
    let dir = tempfile::tempdir().unwrap();
    let case = fixtures().join("42_batch_mixed");
    let meta: Value = serde_json::from_str(&std::fs::read_to_string(case.join("meta.json")).unwrap()).unwrap();
    let names: Vec<&str> =
        meta["adapters_in_slot_order"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let base = BaseModel::open(fixtures().join("_base/llama")).unwrap();
    let adapters: Vec<Adapter> = names.iter().map(|name| load(fixtures().join(name), Some(&base)).unwrap()).collect();
    let expected = std::fs::read(case.join("expected.safetensors")).unwrap();
    let slots: Vec<i64> =
        values(&SafeTensors::deserialize(&expected).unwrap(), "slots").into_iter().map(|slot| slot as i64).collect();
    assert_eq!(slots.len(), 33);
    let output = dir.path().join("out.safetensors").display().to_string();
    let input = fixture("42_batch_mixed/expected.safetensors");
    for backend in backends() {
        for op in ["bgmv", "sgmv"] {
            let mut args: Vec<String> =
                ["apply", "--input", &input, "--output", &output, "--backend", &backend, "--op", op, "--json"]
                    .map(str::to_owned)
                    .into();
            args.extend(["--base".to_owned(), fixture("_base/llama")]);
            for name in &names {
                args.extend(["--adapter".to_owned(), format!("{name}={}", fixture(name))]);
            }
            let ran = lorapool(args);
            assert_eq!(ran.code, 0, "{backend}: {ran:?}");
            let (check, sites) =
                check("42_batch_mixed", &adapters, Some(&slots), &expected, &std::fs::read(&output).unwrap());
            assert_eq!(sites, 3);
            assert!(check.passed(), "{op} on {backend}: {:?}", check.first);
            assert_eq!(check.elements, 33 * (48 + 48 + 48));
            let without = slots.iter().filter(|slot| **slot < 0).count() * sites;
            assert_eq!(ran.json()["base_rows"], without);
        }
    }
}

#[test]
fn a_sum_of_adapters_gives_the_sum_of_pefts_deltas() {
    let dir = tempfile::tempdir().unwrap();
    let (cases, weights) = (["01_plain_f32", "07_rank_pattern"], [0.5, -2.0]);
    let files = cases.map(|case| std::fs::read(fixtures().join(case).join("expected.safetensors")).unwrap());
    let output = dir.path().join("out.safetensors").display().to_string();
    let sum = format!("sum={}@0.5+{}@-2", fixture(cases[0]), fixture(cases[1]));
    let (base, input) = (fixture("_base/llama"), fixture("01_plain_f32/expected.safetensors"));
    for backend in backends() {
        let args = ["apply", "--base", &base, "--adapter", &sum, "--input", &input, "--output", &output];
        let ran = lorapool(args.into_iter().chain(["--backend", &backend, "--json"]));
        assert_eq!(ran.code, 0, "{ran:?}");
        let written = std::fs::read(&output).unwrap();
        let written = SafeTensors::deserialize(&written).unwrap();
        let peft = files.each_ref().map(|file| SafeTensors::deserialize(file).unwrap());
        assert_eq!(written.len(), 14);
        for name in written.names() {
            let site = name.strip_suffix("|y").unwrap();
            let base = values(&peft[0], &format!("{site}|y_base"));
            let y = peft.each_ref().map(|file| values(file, name));
            for (at, found) in values(&written, name).into_iter().enumerate() {
                let delta = |i: usize| weights[i] * (y[i][at] - base[at]);
                let expected = base[at] + delta(0) + delta(1);
                assert!((found - expected).abs() < 1e-5 * (1.0 + expected.abs()), "{name} [{at}]: {found} {expected}");
            }
        }
        std::fs::remove_file(&output).unwrap();
    }
}
