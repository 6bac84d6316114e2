//! `lorapool apply` on inputs of every shape and type, right and wrong.

use std::path::PathBuf;

use half::{bf16, f16};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use tempfile::TempDir;

use crate::{Ran, fixture, lorapool, named};

/// A site of 05_r1, which has rank 1 and scale 1.
const SITE: &str = "model.layers.0.self_attn.q_proj";
const WIDTH: usize = 48;

/// A tensor to be written.
#[derive(Clone)]
struct Tensor(String, Dtype, Vec<usize>, Vec<u8>);

fn tensor(name: &str, dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Tensor {
    Tensor(name.to_owned(), dtype, shape.to_vec(), bytes)
}

/// `SITE|x` and `SITE|y_base` of f32 ones.
fn ones(lead: &[usize]) -> Vec<Tensor> {
    let shape: Vec<usize> = lead.iter().copied().chain([WIDTH]).collect();
    let bytes = 1f32.to_le_bytes().repeat(shape.iter().product());
    ["x", "y_base"].map(|part| tensor(&format!("{SITE}|{part}"), Dtype::F32, &shape, bytes.clone())).into()
}

struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, tensors: &[Tensor]) {
        let view = |t: &Tensor| (t.0.clone(), t.1, t.2.clone(), t.3.clone());
        let owned: Vec<_> = tensors.iter().map(view).collect();
        let views = owned
            .iter()
            .map(|(name, dtype, shape, bytes)| (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        std::fs::write(self.path("in.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    }

    /// Runs with one adapter on the CPU.
    fn run(&self, more: &[&str]) -> Ran {
        let (base, adapter) = (fixture("_base/llama"), named("a", "05_r1"));
        let input = self.path("in.safetensors").display().to_string();
        let output = self.path("out.safetensors").display().to_string();
        let args = ["apply", "--backend", "cpu", "--json", "--base", &base, "--adapter", &adapter];
        let files = ["--input", &input, "--output", &output];
        lorapool(args.into_iter().chain(files).chain(more.iter().copied()))
    }

    /// y of the one site, and its shape.
    fn y(&self) -> (Vec<usize>, Vec<f32>) {
        let bytes = std::fs::read(self.path("out.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = file.tensor(&format!("{SITE}|y")).unwrap();
        let values = tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        (tensor.shape().to_vec(), values)
    }
}

#[test]
fn any_leading_shape_comes_back_as_it_was() {
    let bench = Bench::new();
    for lead in [&[][..], &[5], &[2, 3], &[1, 2, 2], &[0], &[3, 0]] {
        bench.write(&ones(lead));
        let ran = bench.run(&[]);
        assert_eq!(ran.code, 0, "{lead:?}: {ran:?}");
        let (shape, y) = bench.y();
        assert_eq!(shape, [lead, &[WIDTH]].concat());
        for row in y.chunks(WIDTH) {
            assert_eq!(row, &y[..WIDTH]);
            assert!(row.iter().any(|value| *value != 1.0));
        }
    }
}

#[test]
fn every_float_type_of_the_same_numbers_gives_the_same_y() {
    let bench = Bench::new();
    bench.write(&ones(&[2]));
    bench.run(&[]);
    let want = bench.y();
    let types: [(Dtype, &[u8]); 5] = [
        (Dtype::F64, &1f64.to_le_bytes()),
        (Dtype::F16, &f16::ONE.to_le_bytes()),
        (Dtype::BF16, &bf16::ONE.to_le_bytes()),
        (Dtype::F8_E5M2, &[0x3c]),
        (Dtype::F8_E4M3, &[0x38]),
    ];
    for (dtype, one) in types {
        let mut tensors = ones(&[2]);
        tensors[0].1 = dtype;
        tensors[0].3 = one.repeat(2 * WIDTH);
        bench.write(&tensors);
        assert_eq!(bench.run(&[]).code, 0, "{dtype:?}");
        assert_eq!(bench.y(), want, "{dtype:?}");
    }
}

#[test]
fn slots_of_any_integer_type_choose_each_rows_adapter() {
    let bench = Bench::new();
    let other = named("b", "07_rank_pattern");
    bench.write(&ones(&[4]));
    bench.run(&[]);
    let (_, first) = bench.y();
    let slots = [0i64, -1, 1, -2];
    let encodings = [
        (Dtype::I64, slots.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<u8>>()),
        (Dtype::I32, slots.iter().flat_map(|s| (*s as i32).to_le_bytes()).collect()),
        (Dtype::I8, slots.iter().map(|s| *s as u8).collect()),
    ];
    for (dtype, bytes) in encodings {
        let mut tensors = ones(&[2, 2]);
        tensors.push(tensor("slots", dtype, &[4], bytes));
        bench.write(&tensors);
        let ran = bench.run(&["--adapter", &other]);
        assert_eq!(ran.code, 0, "{ran:?}");
        assert_eq!(ran.json()["base_rows"], 2);
        let (_, y) = bench.y();
        assert_eq!(y[..WIDTH], first[..WIDTH], "{dtype:?}");
        assert_eq!(y[WIDTH..2 * WIDTH], [1.0; WIDTH]);
        assert_ne!(y[2 * WIDTH..3 * WIDTH], first[..WIDTH]);
        assert_ne!(y[2 * WIDTH..3 * WIDTH], [1.0; WIDTH]);
        assert_eq!(y[3 * WIDTH..], [1.0; WIDTH]);
    }
}

#[test]
fn a_site_without_a_pair_keeps_the_bases_output_and_other_tensors_are_passed_over() {
    let bench = Bench::new();
    let mut tensors: Vec<Tensor> = ones(&[1]);
    tensors.iter_mut().for_each(|t| t.0 = t.0.replace("q_proj", "o_proj"));
    tensors.push(tensor("logits", Dtype::I32, &[1], vec![0; 4]));
    bench.write(&tensors);
    let ran = bench.run(&[]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let document = ran.json();
    assert_eq!(document["passed_over"], serde_json::json!(["logits"]));
    assert_eq!((&document["adapters"][0]["sites"], &document["adapters"][0]["applied"]), (&4.into(), &0.into()));
    let bytes = std::fs::read(bench.path("out.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor(&format!("{}|y", SITE.replace("q_proj", "o_proj"))).unwrap().data(), tensors[1].3);
}

#[test]
fn wrong_inputs_are_named_and_leave_the_output_alone() {
    let bench = Bench::new();
    let x = || ones(&[2]).swap_remove(0);
    let y = || ones(&[2]).swap_remove(1);
    let slots = |dtype, shape: &[usize], bytes: Vec<u8>| tensor("slots", dtype, shape, bytes);
    let i32s = |slots: &[i32]| slots.iter().flat_map(|slot| slot.to_le_bytes()).collect::<Vec<u8>>();
    let f32s = |shape: &[usize]| 1f32.to_le_bytes().repeat(shape.iter().product());
    let changed = |mut t: Tensor, name: &str| {
        t.0 = name.to_owned();
        t
    };
    let shaped = |t: Tensor, shape: &[usize]| Tensor(t.0, Dtype::F32, shape.to_vec(), f32s(shape));
    let mut infinite = x();
    infinite.1 = Dtype::F64;
    infinite.3 = 1e300f64.to_le_bytes().repeat(2 * WIDTH);
    let wrong: Vec<(Vec<Tensor>, &str, Vec<&str>)> = vec![
        (vec![changed(x(), "q_proj|x"), y()], "E_INPUT", vec!["\"q_proj|x\"", "nearest", SITE]),
        (vec![x()], "E_INPUT", vec!["q_proj|y_base"]),
        (vec![y()], "E_INPUT", vec!["SITE|x"]),
        (vec![], "E_FILE_", vec!["in.safetensors"]),
        (vec![shaped(x(), &[2, 47]), y()], "E_SHAPE", vec!["q_proj|x", "[2, 47]", "48"]),
        (vec![shaped(x(), &[]), y()], "E_SHAPE", vec!["q_proj|x", "[]"]),
        (vec![x(), shaped(y(), &[3, 48])], "E_SHAPE", vec!["q_proj|y_base", "[3, 48]"]),
        (vec![x(), shaped(y(), &[2, 47])], "E_SHAPE", vec!["q_proj|y_base", "[2, 47]", "48"]),
        (vec![Tensor(x().0, Dtype::I32, vec![2, WIDTH], x().3), y()], "E_SHAPE", vec!["q_proj|x", "I32"]),
        (vec![infinite, y()], "E_OVERFLOW", vec!["q_proj|x", "f32"]),
        (vec![x(), y(), slots(Dtype::I32, &[2], i32s(&[0, 1]))], "E_SHAPE", vec!["slots", "row 1", "found 1"]),
        (vec![x(), y(), slots(Dtype::I32, &[2], i32s(&[-3, 0]))], "E_SHAPE", vec!["row 0", "-3"]),
        (vec![x(), y(), slots(Dtype::I32, &[3], i32s(&[0, 0, 0]))], "E_SHAPE", vec!["q_proj|x", "2 rows", "3"]),
        (vec![x(), y(), slots(Dtype::F32, &[2], i32s(&[0, 0]))], "E_SHAPE", vec!["slots", "F32"]),
    ];
    std::fs::write(bench.path("out.safetensors"), "old").unwrap();
    for (tensors, code, words) in wrong {
        bench.write(&tensors);
        let ran = bench.run(&[]);
        let found = ran.json()["error"]["code"].as_str().unwrap_or_default().to_owned();
        let code = if code == "E_FILE_" || (tensors.is_empty() && found == "E_INPUT") { found.as_str() } else { code };
        ran.fails(1, code, &words);
        assert_eq!(std::fs::read(bench.path("out.safetensors")).unwrap(), b"old", "{words:?}");
        assert_eq!(std::fs::read_dir(bench.dir.path()).unwrap().count(), 2, "{words:?}");
    }
}

#[test]
fn damaged_and_missing_files_are_errors_at_every_length() {
    let bench = Bench::new();
    bench.run(&[]).fails(1, "E_NOT_FOUND", &["in.safetensors"]);
    bench.write(&ones(&[2]));
    let whole = std::fs::read(bench.path("in.safetensors")).unwrap();
    for len in [0, 4, 8, 9, 60, whole.len() / 2, whole.len() - 1] {
        std::fs::write(bench.path("in.safetensors"), &whole[..len]).unwrap();
        let ran = bench.run(&[]);
        let code = if len == 0 { "E_FILE_EMPTY" } else { "E_FILE_TRUNCATED" };
        ran.fails(1, code, &["in.safetensors"]);
    }
    let mut huge = whole.clone();
    huge[..8].copy_from_slice(&(1u64 << 62).to_le_bytes());
    std::fs::write(bench.path("in.safetensors"), huge).unwrap();
    bench.run(&[]).fails(1, "E_FILE_HEADER", &["in.safetensors"]);
    std::fs::write(bench.path("in.safetensors"), [&whole[..], b"more"].concat()).unwrap();
    bench.run(&[]).fails(1, "E_FILE_TRAILING", &["in.safetensors"]);
    assert!(!bench.path("out.safetensors").exists());
}

#[test]
fn an_output_that_cannot_be_written_is_an_error() {
    let bench = Bench::new();
    bench.write(&ones(&[2]));
    let nowhere = bench.path("no/such/folder/out.safetensors").display().to_string();
    let here = bench.dir.path().display().to_string();
    let (adapter, input) = (named("a", "05_r1"), bench.path("in.safetensors").display().to_string());
    for output in [&nowhere, &here] {
        let args = ["apply", "--backend", "cpu", "--json", "--adapter", &adapter, "-i", &input, "-o", output];
        lorapool(args).fails(1, "E_IO", &[output]);
    }
}

#[test]
fn the_input_may_be_replaced_by_the_output() {
    let bench = Bench::new();
    bench.write(&ones(&[2]));
    bench.run(&[]);
    let want = std::fs::read(bench.path("out.safetensors")).unwrap();
    let (adapter, path) = (named("a", "05_r1"), bench.path("in.safetensors").display().to_string());
    let ran = lorapool(["apply", "--backend", "cpu", "--json", "--adapter", &adapter, "-i", &path, "-o", &path]);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(std::fs::read(&path).unwrap(), want);
}
