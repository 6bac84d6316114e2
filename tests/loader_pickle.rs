//! `adapter_model.bin`: what torch.save writes is read exactly, and nothing else is read at all.

mod loader_support;
#[path = "loader_support/torch.rs"]
mod torch;

use std::fs;
use std::path::Path;

use loader_support::{assert_refused, fixtures, read_tensors};
use lorapool::Error;
use lorapool::adapter::{Code, Reject, StateDict, load, pickled};
use torch::{Pickle, dict, file, zip};

const Q: &str = "base_model.model.model.layers.0.self_attn.q_proj";

/// Opens a `.bin` of these bytes.
fn open(bytes: &[u8]) -> Result<StateDict, Reject> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("adapter_model.bin");
    fs::write(&path, bytes).unwrap();
    StateDict::open(&path).map_err(|error| match error {
        Error::Reject(reject) => *reject,
        other => panic!("{other}"),
    })
}

#[track_caller]
fn refused(bytes: &[u8], code: Code, named: &[&str]) {
    let reject = open(bytes).map(|state| panic!("accepted {state:?}")).unwrap_err();
    assert_eq!(reject.code, code, "{reject}");
    for word in named.iter().chain(&["adapter_model.bin"]) {
        assert!(reject.message.contains(word), "{word:?} is not named: {reject}");
    }
}

fn floats(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| (i as f32 * 0.25 - 1.0).to_le_bytes()).collect()
}

/// One well-formed tensor.
fn one(kind: &str, elements: u32, offset: u32, shape: &[u32], strides: &[u32]) -> Vec<u8> {
    dict(Pickle::default().text("x").tensor(kind, "0", elements, offset, shape, strides))
}

/// Writes what was read and reads it without the loader.
fn written(state: &StateDict, dir: &Path) -> std::collections::BTreeMap<String, loader_support::Tensor> {
    let path = dir.join("out.safetensors");
    state.write(&path).unwrap();
    read_tensors(&path)
}

#[test]
fn a_file_that_torch_wrote_becomes_the_adapter_that_it_was_saved_beside() {
    let bin = fixtures().join("d_bin_only");
    assert_refused(load(&bin, None), Code::WeightsPickle, &["adapter_model.bin", "lorapool convert"]);
    let (config, weights) = pickled(&bin).unwrap();
    let state = StateDict::open(&weights).unwrap();
    let out = tempfile::tempdir().unwrap();
    fs::copy(config, out.path().join("adapter_config.json")).unwrap();
    state.write(out.path().join("adapter_model.safetensors")).unwrap();
    let expected = load(fixtures().join("05_r1"), None).unwrap();
    assert_eq!(load(out.path(), None).unwrap().digest, expected.digest);
}

#[test]
fn every_element_type_layout_and_wrapper_of_a_state_dict_is_read_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let whole = floats(12);
    // A view of a storage, a transposed one, and a scalar; a parameter; a module's state dict with _metadata.
    let items = Pickle::default()
        .text("row")
        .tensor("FloatStorage", "0", 12, 4, &[2, 4], &[4, 1])
        .text("transposed")
        .tensor("FloatStorage", "0", 12, 0, &[4, 3], &[1, 4])
        .text("scalar")
        .tensor("FloatStorage", "0", 12, 5, &[], &[])
        .text("empty")
        .tensor("FloatStorage", "0", 12, 12, &[0, 3], &[3, 1])
        .text("half")
        .tensor("HalfStorage", "1", 2, 0, &[2, 1], &[1, 7])
        .text("long")
        .tensor("LongStorage", "2", 1, 0, &[1], &[1])
        .text("parameter")
        .global("torch._utils", "_rebuild_parameter")
        .op(b"(")
        .tensor("DoubleStorage", "2", 1, 0, &[1], &[1])
        .op(b"\x88")
        .global("collections", "OrderedDict")
        .op(b")RtR");
    let metadata = Pickle::default().op(b"}").text("_metadata").global("collections", "OrderedDict").op(b")Rsb");
    let pickle = Pickle::default()
        .op(b"\x80\x02")
        .global("collections", "OrderedDict")
        .op(b")Rq\x00(")
        .op(&items.0)
        .op(b"u")
        .op(&metadata.0)
        .op(b".");
    let state =
        open(&file(&pickle.0, &[("0", &whole), ("1", &[0, 0x3c, 0, 0xc0]), ("2", &1.5f64.to_le_bytes())])).unwrap();
    assert_eq!((state.len(), state.bytes()), (7, 32 + 48 + 4 + 4 + 8 + 8));
    let read = written(&state, dir.path());
    let value = |i: usize| i as f64 * 0.25 - 1.0;
    assert_eq!(read["row"].values, (4..12).map(value).collect::<Vec<_>>());
    let transposed: Vec<_> = (0..4).flat_map(|i| (0..3).map(move |j| value(i + 4 * j))).collect();
    assert_eq!((read["transposed"].values.clone(), &*read["transposed"].shape), (transposed, &[4, 3][..]));
    assert_eq!((read["scalar"].values.clone(), read["scalar"].shape.len()), (vec![value(5)], 0));
    assert_eq!((read["empty"].values.len(), &*read["empty"].shape), (0, &[0, 3][..]));
    assert_eq!(read["half"].values, [1.0, -2.0]);
    assert_eq!(read["long"].values, [1.5f64.to_bits() as f64]);
    assert_eq!(read["parameter"].values, [1.5]);
}

#[test]
fn a_pickle_that_would_run_something_is_refused_and_nothing_is_run() {
    let dir = tempfile::tempdir().unwrap();
    let witness = dir.path().join("ran");
    let command = format!("touch {}", witness.display());
    let call = |module: &str, name: &str| {
        let pickle = Pickle::default().op(b"\x80\x02").global(module, name).op(b"(").text(&command).op(b"tR.");
        file(&pickle.0, &[])
    };
    for (module, name) in [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("__builtin__", "exec"),
        ("subprocess", "Popen"),
        ("torch", "load"),
        ("torch", "Tensor"),
        ("torch.storage", "_load_from_bytes"),
        ("torch._utils", "_rebuild_tensor"),
        ("collections", "Counter"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("torch.nn.modules.linear", "Linear"),
    ] {
        refused(&call(module, name), Code::PickleGlobal, &[module, name]);
    }
    // By way of STACK_GLOBAL, of a nested value, and hidden behind what is allowed.
    let stacked = Pickle::default().op(b"\x80\x04\x8c\x02os\x8c\x06system\x93(").text(&command).op(b"tR.");
    refused(&file(&stacked.0, &[]), Code::PickleGlobal, &["os.system"]);
    let hidden = dict(Pickle::default().text("x").op(b"}").text("y").global("os", "system").op(b")Rs"));
    refused(&file(&hidden, &[]), Code::PickleGlobal, &["os.system"]);
    // INST, OBJ, NEWOBJ, EXT1, PERSID, BINBYTES, BUILD on a class.
    for opcodes in
        [&b"(ios\nsystem\n."[..], b"(cos\nsystem\no.", b"\x82\x01.", b"P0\n.", b"B\x01\0\0\0x.", b"\x80\x02)\x81."]
    {
        let reject = open(&file(opcodes, &[])).unwrap_err();
        assert!(matches!(reject.code, Code::PickleOpcode | Code::PickleGlobal), "{reject}");
    }
    let built = Pickle::default().op(b"\x80\x02").global("collections", "OrderedDict").op(b"}b.");
    refused(&file(&built.0, &[]), Code::PickleOpcode, &["attributes"]);
    let called = Pickle::default().op(b"\x80\x02}").op(b")R.");
    refused(&file(&called.0, &[]), Code::PickleOpcode, &["calls a dict"]);
    assert!(!witness.exists());
}

#[test]
fn what_is_no_flat_dict_of_tensors_is_named() {
    let of = |items: Pickle| file(&dict(items), &[("0", &floats(4))]);
    let tensor = |p: Pickle| p.tensor("FloatStorage", "0", 4, 0, &[4], &[1]);
    refused(&of(Pickle::default().text("step").int(3)), Code::PickleValue, &["step", "an int"]);
    refused(&of(tensor(Pickle::default().int(3))), Code::PickleValue, &["an int as a key"]);
    refused(&of(Pickle::default().text("state_dict").op(b"}")), Code::PickleValue, &["state_dict", "a dict"]);
    refused(&of(tensor(tensor(Pickle::default().text("x")).text("x"))), Code::FileDuplicate, &["\"x\""]);
    refused(&file(b"\x80\x02].", &[]), Code::PickleValue, &["a list"]);
    refused(&file(b"\x80\x02N.", &[]), Code::PickleValue, &["None"]);
    let unknown = Pickle::default().text("x").tensor("QInt8Storage", "0", 4, 0, &[4], &[1]);
    refused(&of(unknown), Code::PickleGlobal, &["torch.QInt8Storage"]);
    for broken in [
        &b"\x80\x02"[..],
        b"",
        b".",
        b"\x80\x02}(u",
        b"t.",
        b"u.",
        b"\x80\x09.",
        b"h\x05.",
        b"X\xff\xff\xff\xff.",
        b"s.",
        b"\x80\x02}}.",
    ] {
        refused(&file(broken, &[]), Code::PickleOpcode, &[]);
    }
    // The state dict loads as no tensor of a LoRA, but has the wrong types: the loader says so, not the converter.
    assert_eq!(open(&of(tensor(Pickle::default().text("x")))).unwrap().len(), 1);
}

#[test]
fn a_tensor_must_lie_in_its_storage() {
    let data = floats(6);
    let case = |pickle: &[u8], named: &[&str]| refused(&file(pickle, &[("0", &data)]), Code::PickleTensor, named);
    case(&one("FloatStorage", 6, 0, &[7], &[1]), &["\"x\"", "6 elements"]);
    case(&one("FloatStorage", 6, 1, &[6], &[1]), &["offset 1"]);
    case(&one("FloatStorage", 6, 0, &[2, 3], &[4, 1]), &["strides [4, 1]"]);
    case(&one("FloatStorage", 8, 0, &[2], &[1]), &["8 elements", "24 bytes"]);
    case(&one("DoubleStorage", 6, 0, &[2], &[1]), &["24 bytes"]);
    case(&one("FloatStorage", 6, 0, &[1 << 30, 1 << 30, 1 << 30], &[0, 0, 0]), &["overflows"]);
    case(&one("FloatStorage", 6, 0, &[1000], &[0]), &["beyond its storage"]);
    case(&one("FloatStorage", 6, 0, &[2, 3], &[1]), &["strides"]);
    case(&one("FloatStorage", 6, 0, &[u32::MAX], &[1]), &["shape"]);
    case(&one("FloatStorage", 6, 7, &[0], &[1]), &["offset 7"]);
    let elsewhere = dict(Pickle::default().text("x").tensor("FloatStorage", "../0", 6, 0, &[6], &[1]));
    case(&elsewhere, &["data/../0", "not there"]);
}

#[test]
fn an_archive_is_what_torch_writes_or_it_is_named() {
    let pickle = one("FloatStorage", 4, 0, &[4], &[1]);
    let good = file(&pickle, &[("0", &floats(4))]);
    assert!(open(&good).is_ok());
    for cut in [1, 4, 30, good.len() / 2, good.len() - 23, good.len() - 1] {
        let reject = open(&good[..cut]).unwrap_err();
        assert_eq!(reject.code, Code::PickleArchive, "{cut}: {reject}");
    }
    // A flipped bit in a tensor: the checksum tells.
    let mut flipped = good.clone();
    let at = good.windows(4).position(|w| w == (-0.75f32).to_le_bytes()).unwrap();
    flipped[at] ^= 1;
    refused(&flipped, Code::PickleArchive, &["data/0", "damaged"]);
    for name in
        ["../evil", "/etc/passwd", "other/data.pkl", "adapter_model/../../evil", "adapter_model/a\\b", "c:/x", "bare"]
    {
        let slip = zip(&[("adapter_model/data.pkl", &pickle), ("adapter_model/data/0", &floats(4)), (name, b"x")]);
        refused(&slip, Code::PickleArchive, &["outside"]);
    }
    refused(&zip(&[("a/version", b"3")]), Code::PickleArchive, &["data.pkl"]);
    refused(&zip(&[]), Code::PickleArchive, &[]);
    refused(&zip(&[("a/data.pkl", &pickle), ("a/constants.pkl", b"")]), Code::PickleArchive, &["TorchScript"]);
    refused(&zip(&[("a/data.pkl", &pickle), ("a/byteorder", b"big")]), Code::PickleArchive, &["big"]);
    let twice = zip(&[("a/data.pkl", &pickle), ("a/data.pkl", &pickle), ("a/data/0", &floats(4))]);
    refused(&twice, Code::PickleArchive, &[]);
    refused(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", Code::PickleArchive, &["before 1.6"]);
    refused(b"version https://git-lfs.github.com/spec/v1\n", Code::FileLfsPointer, &[]);
    refused(b"<!doctype html>", Code::FileHtml, &[]);
    refused(b"", Code::FileEmpty, &[]);
    // Deflated, and so small that it says it is 4 GiB long.
    for (method, size) in [(8u16, 4u32), (0, u32::MAX - 1)] {
        let mut bomb = good.clone();
        for (at, _) in good.windows(4).enumerate().filter(|(_, w)| w == b"PK\x01\x02") {
            bomb[at + 10..at + 12].copy_from_slice(&method.to_le_bytes());
            if size > 4 {
                bomb[at + 20..at + 24].copy_from_slice(&size.to_le_bytes());
                bomb[at + 24..at + 28].copy_from_slice(&size.to_le_bytes());
            }
        }
        refused(&bomb, Code::PickleArchive, &[]);
    }
}

#[test]
fn no_file_makes_the_reader_take_much_memory() {
    const MIB: usize = 1 << 20;
    let many = |unit: &[u8], start: &[u8]| [start, &unit.repeat(2 * MIB / unit.len()), b"."].concat();
    let cases = [
        ("stack", many(b"N", b"\x80\x02")),
        ("marks", many(b"(", b"\x80\x02")),
        ("dicts", many(b"}0", b"\x80\x02")),
        ("dicts kept", many(b"}", b"\x80\x02")),
        ("memo", many(b"\x94", b"\x80\x04N")),
        ("nested tuples", many(b"\x85", b"\x80\x02N")),
        ("doubled tuples", many(b"q\x00h\x00\x86", b"\x80\x02)")),
        ("one memo cell", many(b"r\xff\xff\xff\xff", b"\x80\x02N")),
        ("reduced dicts", many(b"h\x00)R", b"\x80\x02ccollections\nOrderedDict\nq\x00")),
        ("items", [b"\x80\x02}".as_slice(), &b"(NNNNNNNNu".repeat(200_000), b"."].concat()),
    ];
    for (what, pickle) in cases {
        let file = file(&pickle, &[]);
        let started = std::time::Instant::now();
        let mut opened = None;
        let used = allocation_counter::measure(|| opened = Some(open(&file))).bytes_max as usize;
        let reject = opened.unwrap().unwrap_err();
        assert!(started.elapsed().as_secs() < 10, "{what}: {:?}", started.elapsed());
        assert!(matches!(reject.code, Code::PickleSize | Code::PickleOpcode | Code::PickleValue), "{what}: {reject}");
        assert!(used < 40 * MIB, "{what}: {used} bytes for a file of {}", file.len());
    }
    // Many tensors of one storage: more than the file by far.
    let items = (0..500).fold(Pickle::default(), |p, i| {
        p.text(&format!("{Q}.{i}")).tensor("FloatStorage", "0", 100_000, 0, &[100_000], &[1])
    });
    refused(&file(&dict(items), &[("0", &floats(100_000))]), Code::PickleSize, &["4 times"]);
}

#[test]
fn damaged_bytes_neither_panic_nor_pass_for_other_tensors() {
    let original = fs::read(fixtures().join("d_bin_only/adapter_model.bin")).unwrap();
    let mut seed = 7u64;
    let mut next = move || {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (seed >> 33) as usize
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("adapter_model.bin");
    let open = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        StateDict::open(&path)
    };
    for _ in 0..1000 {
        let mut bytes = original.clone();
        for _ in 0..1 + next() % 3 {
            let at = next() % bytes.len();
            bytes[at] = next() as u8;
        }
        _ = open(&bytes);
        // In the pickle, with a checksum that agrees.
        let mut pickle = one("FloatStorage", 4, 0, &[2, 2], &[2, 1]);
        for _ in 0..1 + next() % 3 {
            let at = next() % pickle.len();
            pickle[at] = next() as u8;
        }
        if let Ok(state) = open(&file(&pickle, &[("0", &floats(4))])) {
            assert!(state.bytes() <= 16);
        }
    }
}
