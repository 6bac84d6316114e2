//! Random adapters against PEFT's rule for ranks and scales, written down once more: the loader's sites, ranks, scales and
//! weights are those that the rule gives.
//!
//! The rule (PEFT 0.21, `get_pattern_key`): of a pattern's keys the first, in the file's order, for which
//! `re.match(r"(.*\.)?(KEY)$", module)`; scaling is alpha / r, or alpha / sqrt(r) under rsLoRA.

mod loader_support;

use std::collections::BTreeMap;

use loader_support::{Files, assert_refused, pair_at};
use lorapool::adapter::Code;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus as Dice;
use serde_json::{Map, Value, json};

/// A piece of a regular expression of the kinds that configs have.
#[derive(Clone, Debug)]
enum Node {
    /// These characters and no others.
    Text(String),
    /// `.`
    Any,
    /// `.*`
    Anything,
    /// `\d+`
    Digits,
    /// `[abc]`
    OneOf(&'static str),
    /// `(?:a|b)`
    Either(Vec<Vec<Node>>),
    /// `^`
    Start,
    /// `(?!a)`
    Not(Vec<Node>),
}

/// As a config writes it.
fn written(nodes: &[Node]) -> String {
    let piece = |node: &Node| match node {
        Node::Text(text) => text.replace('.', r"\."),
        Node::Any => ".".to_owned(),
        Node::Anything => ".*".to_owned(),
        Node::Digits => r"\d+".to_owned(),
        Node::OneOf(chars) => format!("[{chars}]"),
        Node::Either(ways) => format!("(?:{})", ways.iter().map(|way| written(way)).collect::<Vec<_>>().join("|")),
        Node::Start => "^".to_owned(),
        Node::Not(nodes) => format!("(?!{})", written(nodes)),
    };
    nodes.iter().map(piece).collect()
}

/// Every place where a match of `nodes` from `from` on can end.
fn ends(nodes: &[Node], text: &str, from: usize) -> Vec<usize> {
    let Some((node, rest)) = nodes.split_first() else { return vec![from] };
    let left = &text[from..];
    let next: Vec<usize> = match node {
        Node::Text(this) => {
            if left.starts_with(&**this) {
                vec![from + this.len()]
            } else {
                vec![]
            }
        }
        Node::Any => {
            if left.is_empty() {
                vec![]
            } else {
                vec![from + 1]
            }
        }
        Node::Anything => (from..=text.len()).collect(),
        Node::Digits => {
            let digits = left.bytes().take_while(u8::is_ascii_digit).count();
            (1..=digits).map(|n| from + n).collect()
        }
        Node::OneOf(chars) => {
            left.chars().next().filter(|c| chars.contains(*c)).map(|_| from + 1).into_iter().collect()
        }
        Node::Either(ways) => ways.iter().flat_map(|way| ends(way, text, from)).collect(),
        Node::Start => {
            if from == 0 {
                vec![0]
            } else {
                vec![]
            }
        }
        Node::Not(nodes) => {
            if ends(nodes, text, from).is_empty() {
                vec![from]
            } else {
                vec![]
            }
        }
    };
    next.into_iter().flat_map(|at| ends(rest, text, at)).collect()
}

/// `re.match(r"(.*\.)?(KEY)$", module)`
fn names(key: &[Node], module: &str) -> bool {
    let after_dots = module.bytes().enumerate().filter(|(_, b)| *b == b'.').map(|(at, _)| at + 1);
    std::iter::once(0).chain(after_dots).any(|from| ends(key, module, from).contains(&module.len()))
}

const LINEARS: [&str; 6] =
    ["self_attn.q_proj", "self_attn.k_proj", "self_attn.q_proj_extra", "mlp.up_proj", "mlp.down_proj", "cross.q_proj"];

fn pick<'a, T>(dice: &mut Dice, from: &'a [T]) -> &'a T {
    &from[dice.random_range(0..from.len())]
}

/// A key that some of the modules may match, or none.
fn key(dice: &mut Dice) -> Vec<Node> {
    let text = |text: &str| Node::Text(text.to_owned());
    let leaf = |dice: &mut Dice| {
        let linear = *pick(dice, &LINEARS);
        match dice.random_range(0..3) {
            0 => linear.to_owned(),
            _ => linear.rsplit('.').next().unwrap().to_owned(),
        }
    };
    let layer = dice.random_range(0..12);
    match dice.random_range(0..10) {
        0 | 1 => vec![Node::Text(leaf(dice))],
        2 => vec![Node::Text(format!("layers.{layer}.{}", pick(dice, &LINEARS)))],
        3 => vec![Node::Start, Node::Text(format!("model.layers.{layer}.")), Node::Anything],
        4 => vec![text("layers."), Node::Digits, text("."), Node::Text(leaf(dice))],
        5 => vec![text("layers."), Node::OneOf("02468"), text("."), Node::Anything],
        6 => vec![Node::Either(vec![vec![Node::Text(leaf(dice))], vec![Node::Text(leaf(dice))]])],
        7 => vec![Node::OneOf("qk"), text("_proj")],
        8 => vec![Node::Not(vec![text("cross")]), Node::Anything, text(".q_proj")],
        _ => vec![text("layers"), Node::Any, Node::Digits, Node::Anything, Node::Text(leaf(dice))],
    }
}

/// Keys in order, and what the first that matches gives.
type Pattern<T> = Vec<(Vec<Node>, T)>;

fn pattern<T>(dice: &mut Dice, value: impl Fn(&mut Dice) -> T) -> Pattern<T> {
    let count = dice.random_range(0..4);
    (0..count).map(|_| (key(dice), value(dice))).collect()
}

fn first<T: Copy>(pattern: &Pattern<T>, module: &str) -> Option<T> {
    pattern.iter().find(|(key, _)| names(key, module)).map(|(_, value)| *value)
}

/// The pattern as JSON, unless two keys are written alike, which no config can have.
fn json_of<T: Copy + Into<Value>>(pattern: &Pattern<T>) -> Option<Value> {
    let map: Map<String, Value> = pattern.iter().map(|(key, value)| (written(key), (*value).into())).collect();
    (map.len() == pattern.len()).then_some(Value::Object(map))
}

/// Rank and scale by module.
type Rule = BTreeMap<String, (usize, f64)>;

/// An adapter, and what the rule makes of it.
fn adapter(dice: &mut Dice) -> Option<(Files, Rule)> {
    let (r, rslora) = (dice.random_range(1..=6), dice.random_bool(0.5));
    let alphas = [1.0f64, 8.0, 16.0, 0.5, 3.7, 0.0, -2.0, 1e-3];
    let alpha = *pick(dice, &alphas);
    let ranks = pattern(dice, |dice| dice.random_range(1..=9u64));
    let scales = pattern(dice, |dice| *pick(dice, &alphas));
    let layers: Vec<usize> = (0..12).filter(|_| dice.random_bool(0.3)).collect();
    let mut files = Files { config: json!({"peft_type": "LORA"}), tensors: Vec::new() }
        .with("r", json!(r))
        .with("lora_alpha", if alpha.fract() == 0.0 { json!(alpha as i64) } else { json!(alpha) })
        .with("use_rslora", json!(rslora))
        .with("rank_pattern", json_of(&ranks)?)
        .with("alpha_pattern", json_of(&scales)?)
        .with("bias", json!("none"));
    // Only checked, never decisive.
    if dice.random_bool(0.5) {
        files = files.with("layers_to_transform", json!(layers));
    }
    match dice.random_range(0..3) {
        0 => files = files.with("target_modules", json!(["q_proj", "up_proj"])),
        1 => files = files.with("target_modules", json!(written(&key(dice)))),
        _ => {}
    }
    let mut expected = BTreeMap::new();
    for layer in layers {
        for linear in LINEARS {
            if dice.random_bool(0.4) {
                continue;
            }
            let module = format!("model.layers.{layer}.{linear}");
            let rank = first(&ranks, &module).map_or(r, |rank| rank as usize);
            let alpha = first(&scales, &module).unwrap_or(alpha);
            let scale = if rslora { alpha / (rank as f64).sqrt() } else { alpha / rank as f64 };
            let (inputs, outputs) = widths(linear);
            files = files.pair(&module, rank, inputs, outputs);
            expected.insert(module, (rank, scale));
        }
    }
    Some((files, expected))
}

/// Widths that no rank has, so that no two parts can be mistaken for each other.
fn widths(linear: &str) -> (usize, usize) {
    match linear {
        "mlp.down_proj" => (17, 11),
        "mlp.up_proj" => (11, 17),
        _ => (11, 13),
    }
}

#[test]
fn random_adapters_have_the_sites_ranks_and_scales_of_pefts_rule() {
    let base = Files { config: json!({"model_type": "none of the usual"}), tensors: Vec::new() };
    let all =
        (0..12).flat_map(|layer| LINEARS.map(|linear| (format!("model.layers.{layer}.{linear}"), widths(linear))));
    let base = all.fold(base, |f, (path, (i, o))| f.tensor(&format!("{path}.weight"), &[o, i])).base().unwrap();
    let (mut sites, mut by_pattern, mut lies) = (0, 0, 0);
    for seed in 0..1500 {
        let mut dice = Dice::seed_from_u64(seed);
        let Some((files, expected)) = adapter(&mut dice) else { continue };
        let base = dice.random_bool(0.5).then_some(&base);
        if expected.is_empty() {
            assert_refused(files.load(base), Code::NoTensors, &[]);
            continue;
        }
        let adapter = files.load(base).unwrap_or_else(|error| panic!("seed {seed}: {error} in {}", files.config));
        let found: Vec<&str> = adapter.pairs.iter().map(|pair| &*pair.site.path).collect();
        assert_eq!(found.len(), expected.len(), "seed {seed}: {found:?}");
        for (module, (rank, scale)) in &expected {
            let pair = pair_at(&adapter, module);
            assert_eq!(pair.rank(), *rank, "seed {seed} {module}: {}", files.config);
            assert_eq!(pair.scale, *scale as f32, "seed {seed} {module}: {}", files.config);
            for (matrix, part) in [(&pair.a, "lora_A"), (&pair.b, "lora_B")] {
                let name = format!("base_model.model.{module}.{part}.weight");
                let (.., bytes) = files.tensors.iter().find(|(tensor, ..)| *tensor == name).unwrap();
                assert_eq!(&matrix.bytes, bytes, "seed {seed} {name}");
            }
            sites += 1;
            by_pattern += usize::from(*rank != files.config["r"].as_u64().unwrap() as usize);
        }
        // A tensor of another rank than the rule's is named.
        let module = *pick(&mut dice, &found);
        let prefix = format!("base_model.model.{module}.");
        let mut lie = files.clone();
        lie.tensors.retain(|(name, ..)| !name.starts_with(&prefix));
        let (inputs, outputs) = widths(module.splitn(4, '.').nth(3).unwrap());
        let rank = expected[module].0 + 1;
        lie = lie.raw_pair(&format!("base_model.model.{module}"), rank, inputs, outputs);
        let named = [module, &format!("rank {rank}"), &format!("rank {}", rank - 1)];
        assert_refused(lie.load(base), Code::RankMismatch, &named);
        lies += 1;
    }
    assert!(sites > 10_000 && by_pattern > 1_000 && lies > 1_000, "{sites} {by_pattern} {lies}");
}

#[test]
fn the_matcher_is_right_about_what_is_known_of_python() {
    let q = "model.layers.10.self_attn.q_proj";
    let text = |text: &str| Node::Text(text.to_owned());
    for (key, matches) in [
        (vec![text("q_proj")], true),
        (vec![text("proj")], false),
        (vec![text("self_attn.q_proj")], true),
        (vec![Node::Start, text("q_proj")], false),
        (vec![Node::Start, text("model."), Node::Anything], true),
        (vec![text("layers."), Node::Digits, text(".self_attn.q_proj")], true),
        (vec![text("layers."), Node::OneOf("1"), Node::Any, Node::Anything], true),
        (vec![Node::Not(vec![text("model")]), Node::Anything], true),
        (vec![Node::Start, Node::Not(vec![text("model")]), Node::Anything], false),
        (vec![Node::Either(vec![vec![text("x")], vec![text("q"), Node::Anything]])], true),
    ] {
        assert_eq!(names(&key, q), matches, "{}", written(&key));
    }
}
