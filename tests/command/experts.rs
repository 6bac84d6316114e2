//! `apply` with routed experts and routers, held to PEFT's own f64 change of each expert's weight.

use std::collections::BTreeMap;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::{backends, fixture, fixtures, lorapool};

/// A case, its base, and for each site of experts: path, experts, inputs, outputs.
const CASES: [(&str, &str); 4] = [
    ("24_moe_target_params_mixtral", "mixtral"),
    ("25_moe_target_params_qwen3", "qwen3moe"),
    ("26b_moe_gptoss_transposed", "gptoss"),
    ("41_moe_v4_per_expert_keys", "mixtral"),
];
const EXPERTS: usize = 4;
const ROWS: usize = 23;

/// A tensor of `NAME|delta_w` as f64.
fn change(file: &SafeTensors<'_>, name: &str) -> Option<Vec<f64>> {
    let tensor = file.tensor(&format!("{name}|delta_w")).ok()?;
    Some(tensor.data().as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect())
}

/// PEFT's change of an expert's weight at a site, `[out][in]`.
fn of_expert(file: &SafeTensors<'_>, base: &str, site: &str, expert: usize, shape: [usize; 2]) -> Vec<f64> {
    let [outputs, inputs] = shape;
    if let Some(all) = change(file, site) {
        let one = &all[expert * inputs * outputs..][..inputs * outputs];
        return match base == "gptoss" {
            false => one.to_vec(),
            true => (0..outputs).flat_map(|n| (0..inputs).map(move |k| one[k * outputs + n])).collect(),
        };
    }
    let (owner, leaf) = site.rsplit_once(".mlp.experts.").unwrap();
    let of = |name: &str| change(file, &format!("{owner}.block_sparse_moe.experts.{expert}.{name}")).unwrap();
    if leaf == "down_proj" { of("w2") } else { [of("w1"), of("w3")].concat() }
}

/// Some numbers of every size up to 1.
fn numbers(count: usize, salt: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + salt * 101) % 251) as f32 / 251.0 - 0.5).collect()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn experts_get_pefts_own_change_of_their_weights_on_every_required_backend() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let experts: Vec<i64> = (0..ROWS).map(|row| [0, 3, 1, -1, 2][row * row % 5]).collect();
    let slots: Vec<i64> = (0..ROWS).map(|row| if row % 7 == 3 { -1 } else { 0 }).collect();
    let words = |values: &[i64]| -> Vec<u8> { values.iter().flat_map(|value| value.to_le_bytes()).collect() };
    for (case, base) in CASES {
        let bytes = std::fs::read(fixtures().join(case).join("expected.safetensors")).unwrap();
        let expected = SafeTensors::deserialize(&bytes).unwrap();
        let mut sites = Vec::new();
        for layer in 0..2 {
            let path = format!("model.layers.{layer}.mlp.experts");
            sites.push((format!("{path}.gate_up_proj"), [40, 48]));
            sites.push((format!("{path}.down_proj"), [48, 20]));
        }
        let mut tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
        tensors.insert("slots".into(), (Dtype::I64, vec![ROWS], words(&slots)));
        for (i, (site, [outputs, inputs])) in sites.iter().enumerate() {
            let (x, y) = (f32s(&numbers(ROWS * inputs, i)), f32s(&numbers(ROWS * outputs, 9 + i)));
            tensors.insert(format!("{site}|x"), (Dtype::F32, vec![ROWS, *inputs], x));
            tensors.insert(format!("{site}|y_base"), (Dtype::F32, vec![ROWS, *outputs], y));
            tensors.insert(format!("{site}|experts"), (Dtype::I64, vec![ROWS], words(&experts)));
        }
        let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        std::fs::write(&from, safetensors::serialize(views, None).unwrap()).unwrap();
        for backend in backends() {
            for op in ["bgmv", "sgmv"] {
                let (model, named) = (fixture(&format!("_base/{base}")), format!("it={}", fixture(case)));
                let (from, target) = (from.display().to_string(), to.display().to_string());
                let args = ["apply", "--base", &model, "--adapter", &named, "--input", &from, "--output", &target];
                let ran = lorapool(args.into_iter().chain(["--backend", &backend, "--op", op, "--json"]));
                assert_eq!(ran.code, 0, "{case} on {backend}: {ran:?}");
                assert_eq!(ran.json()["adapters"][0]["applied"], sites.len(), "{case}");
                let output = std::fs::read(&to).unwrap();
                let output = SafeTensors::deserialize(&output).unwrap();
                for (i, (site, [outputs, inputs])) in sites.iter().enumerate() {
                    let got = output.tensor(&format!("{site}|y")).unwrap();
                    let got: Vec<f32> = got.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
                    let (x, y) = (numbers(ROWS * inputs, i), numbers(ROWS * outputs, 9 + i));
                    for row in 0..ROWS {
                        let at = row * outputs..(row + 1) * outputs;
                        let Ok(expert) = usize::try_from(experts[row]).map(|e| e.min(EXPERTS)) else {
                            assert_eq!(got[at.clone()], y[at], "{case} {site}: a row without an expert");
                            continue;
                        };
                        if slots[row] < 0 {
                            assert_eq!(got[at.clone()], y[at], "{case} {site}: a row of the base");
                            continue;
                        }
                        let weight = of_expert(&expected, base, site, expert, [*outputs, *inputs]);
                        let x = &x[row * inputs..(row + 1) * inputs];
                        for (n, (got, y)) in got[at.clone()].iter().zip(&y[at]).enumerate() {
                            let terms = weight[n * inputs..][..*inputs].iter().zip(x).map(|(w, x)| w * f64::from(*x));
                            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
                            let (want, bound) = (f64::from(*y) + sum, 1e-5 * (1.0 + size));
                            let off = (f64::from(*got) - want).abs();
                            assert!(
                                off < bound,
                                "{case} {op} on {backend}: {site} row {row} output {n}: {got}, {want}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_router_is_a_linear_and_gets_pefts_own_change_of_its_weight() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let bytes = std::fs::read(fixtures().join("26_moe_router/expected.safetensors")).unwrap();
    let weight = change(&SafeTensors::deserialize(&bytes).unwrap(), "model.layers.1.mlp.gate.weight").unwrap();
    let (x, y) = (numbers(5 * 48, 1), numbers(5 * 4, 2));
    let (x_bytes, y_bytes) = (f32s(&x), f32s(&y));
    let tensors = [
        ("model.layers.1.mlp.gate|x", TensorView::new(Dtype::F32, vec![5, 48], &x_bytes).unwrap()),
        ("model.layers.1.mlp.gate|y_base", TensorView::new(Dtype::F32, vec![5, 4], &y_bytes).unwrap()),
    ];
    std::fs::write(&from, safetensors::serialize(tensors, None).unwrap()).unwrap();
    for backend in backends() {
        let (model, named) = (fixture("_base/mixtral"), format!("it={}", fixture("26_moe_router")));
        let (from, target) = (from.display().to_string(), to.display().to_string());
        let args = ["apply", "--base", &model, "--adapter", &named, "--input", &from, "--output", &target];
        let ran = lorapool(args.into_iter().chain(["--backend", &backend]));
        assert_eq!(ran.code, 0, "{backend}: {ran:?}");
        let output = std::fs::read(&to).unwrap();
        let output = SafeTensors::deserialize(&output).unwrap();
        let got = output.tensor("model.layers.1.mlp.gate|y").unwrap();
        let got: Vec<f32> = got.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        for (i, (got, y)) in got.iter().zip(&y).enumerate() {
            let (row, n) = (i / 4, i % 4);
            let sum: f64 = weight[n * 48..][..48].iter().zip(&x[row * 48..]).map(|(w, x)| w * f64::from(*x)).sum();
            assert!((f64::from(*got) - f64::from(*y) - sum).abs() < 1e-5, "{backend}: row {row} output {n}");
        }
    }
}

#[test]
fn experts_that_are_missing_or_out_of_range_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let (from, to) = (dir.path().join("in.safetensors"), dir.path().join("out.safetensors"));
    let site = "model.layers.0.mlp.experts.down_proj";
    let (x, y) = (f32s(&numbers(2 * 20, 1)), f32s(&numbers(2 * 48, 2)));
    let write = |experts: Option<[i64; 2]>| {
        let words: Vec<u8> = experts.iter().flatten().flat_map(|e| e.to_le_bytes()).collect();
        let mut tensors = vec![
            (format!("{site}|x"), TensorView::new(Dtype::F32, vec![2, 20], &x).unwrap()),
            (format!("{site}|y_base"), TensorView::new(Dtype::F32, vec![2, 48], &y).unwrap()),
        ];
        if experts.is_some() {
            tensors.push((format!("{site}|experts"), TensorView::new(Dtype::I64, vec![2], &words).unwrap()));
        }
        std::fs::write(&from, safetensors::serialize(tensors, None).unwrap()).unwrap();
    };
    for (experts, named) in [(None, "|experts"), (Some([0, 4]), "row 1"), (Some([-2, 0]), "row 0")] {
        write(experts);
        let (model, named_path) = (fixture("_base/mixtral"), format!("it={}", fixture("24_moe_target_params_mixtral")));
        let (from, target) = (from.display().to_string(), to.display().to_string());
        let args = ["apply", "--base", &model, "--adapter", &named_path, "--input", &from, "--output", &target];
        let ran = lorapool(args.into_iter().chain(["--backend", "cpu"]));
        assert_ne!(ran.code, 0, "{experts:?}");
        assert!(ran.stderr.contains(named) && ran.stderr.contains(site), "{experts:?}: {ran:?}");
        assert!(!to.exists());
    }
}
