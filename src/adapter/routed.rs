//! The routed layers of a base: which of their linears each expert has for itself, however their weights are kept.
//!
//! Transformers 5 keeps all experts of a layer in one parameter, `[experts][out][in]`, in some models `[experts][in][out]`,
//! gate and up in one or apart; before it kept a linear for each, and so do files that were converted from there.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::ExpertPair;
use super::base::BaseModel;
use super::json::Json;
use super::reject::{Code, Loaded, Reject};
use super::site::{SiteId, natural};

/// A linear that each expert of a routed layer has for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLinear {
    /// Where: the path of the parameter, or that of the experts' linears without the number,
    /// `model.layers.0.mlp.experts.gate_up_proj`.
    pub site: SiteId,
    /// Number of experts.
    pub experts: usize,
    /// Width of the input.
    pub in_features: usize,
    /// Width of the output.
    pub out_features: usize,
}

impl ExpertLinear {
    /// Whether it reads its tokens' x, as gate and up do, and not rows that each expert made itself, as down does.
    pub fn reads_tokens(&self) -> bool {
        Role::of(self.site.path.rsplit('.').next().unwrap_or_default()) != Some(Role::Down)
    }
}

/// What a linear is to an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// Gate and up in one: gate's rows before up's, but for models that interleave them.
    GateUp,
    Gate,
    Up,
    Down,
}

impl Role {
    /// By the name of the linear.
    pub(super) fn of(leaf: &str) -> Option<Self> {
        Some(match leaf {
            "gate_up_proj" => Role::GateUp,
            "gate_proj" | "w1" => Role::Gate,
            "up_proj" | "w3" => Role::Up,
            "down_proj" | "w2" => Role::Down,
            _ => return None,
        })
    }
}

/// An expert's linear by the path of its module: that of all experts, the expert's number, and its name.
pub(super) fn single(path: &str) -> Option<(&str, usize, &str)> {
    let (rest, leaf) = path.rsplit_once('.')?;
    let (parent, number) = rest.rsplit_once('.')?;
    if !is_experts(parent) || Role::of(leaf).is_none() {
        return None;
    }
    // No layer has a million experts.
    Some((parent, number.parse().ok().filter(|number| *number < 1 << 20)?, leaf))
}

/// Whether a path is that of all experts of a layer.
pub(super) fn is_experts(path: &str) -> bool {
    path.rsplit('.').next() == Some("experts")
}

/// The routed linears among weights, by path, and the paths of the linears that they are made of.
#[derive(Debug, Default)]
struct Found {
    /// Experts, inputs and outputs.
    linears: BTreeMap<String, [usize; 3]>,
    singles: Vec<String>,
}

/// Looks for routed linears among weights by name and shape.
fn find<'a>(config: Option<&Json>, weights: impl Iterator<Item = (&'a str, &'a [usize])>) -> Found {
    let mut whole: BTreeMap<&str, Vec<(&str, [usize; 3])>> = BTreeMap::new();
    let mut apart: BTreeMap<(&str, &str), BTreeMap<usize, [usize; 2]>> = BTreeMap::new();
    for (name, shape) in weights {
        let path = name.strip_suffix(".weight").unwrap_or(name);
        match *shape {
            [experts, rows, cols] => {
                let Some((parent, leaf)) = path.rsplit_once('.') else { continue };
                if is_experts(parent) && Role::of(leaf).is_some() {
                    whole.entry(parent).or_default().push((leaf, [experts, rows, cols]));
                }
            }
            [rows, cols] if path != name => {
                if let Some((parent, expert, leaf)) = single(path) {
                    apart.entry((parent, leaf)).or_default().insert(expert, [rows, cols]);
                }
            }
            _ => {}
        }
    }
    let mut found = Found::default();
    for (parent, list) in whole {
        let transposed = transposed(config, &list);
        for (leaf, [experts, rows, cols]) in list {
            let (inputs, outputs) = if transposed { (rows, cols) } else { (cols, rows) };
            found.linears.insert(format!("{parent}.{leaf}"), [experts, inputs, outputs]);
        }
    }
    for ((parent, leaf), shapes) in apart {
        // All there, and all alike: else they are linears like any other.
        let count = shapes.len();
        let Some([rows, cols]) = shapes.values().next().copied() else { continue };
        if shapes.keys().next_back() == Some(&(count - 1)) && shapes.values().all(|shape| *shape == [rows, cols]) {
            found.linears.entry(format!("{parent}.{leaf}")).or_insert([count, cols, rows]);
            found.singles.extend((0..count).map(|expert| format!("{parent}.{expert}.{leaf}")));
        }
    }
    found
}

/// Whether a layer's parameters are `[experts][in][out]`.
fn transposed(config: Option<&Json>, list: &[(&str, [usize; 3])]) -> bool {
    let shape = |role: Role| list.iter().find(|(leaf, _)| Role::of(leaf) == Some(role)).map(|(_, shape)| *shape);
    let (gate_up, down) = (shape(Role::GateUp), shape(Role::Down));
    if let (Some([_, a, b]), Some([_, c, d])) = (gate_up, down) {
        // [2I, H] and [H, I], or [H, 2I] and [I, H]: never both.
        if b == c && a == 2 * d {
            return false;
        }
        if a == d && b == 2 * c {
            return true;
        }
    }
    let hidden =
        config.and_then(|config| text(config).get("hidden_size")).and_then(Json::as_int).map(|hidden| hidden as usize);
    let inputs = [gate_up, shape(Role::Gate), shape(Role::Up)].into_iter().flatten().map(|[_, a, b]| (a, b));
    let outputs = down.map(|[_, c, d]| (d, c));
    for (rows, cols) in inputs.chain(outputs) {
        if let Some(hidden) = hidden.filter(|_| rows != cols) {
            return rows == hidden;
        }
    }
    interleaved(config)
}

/// Whether gate and up of a fused parameter lie element by element, and its matrices are kept transposed.
fn interleaved(config: Option<&Json>) -> bool {
    model_type(config) == Some("gpt_oss")
}

fn model_type(config: Option<&Json>) -> Option<&str> {
    let config = config?;
    text(config).get("model_type").or(config.get("model_type")).and_then(Json::as_str)
}

/// What a config says of the text model: in models that see, a part of it.
fn text(config: &Json) -> &Json {
    config.get("text_config").filter(|text| matches!(text, Json::Object(_))).unwrap_or(config)
}

/// Experts that a token is sent to, by the names that families give their number.
fn per_token(config: &Json) -> Option<usize> {
    let names = ["num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk"];
    let count = names.into_iter().find_map(|name| text(config).get(name)?.as_int())?;
    usize::try_from(count).ok().filter(|count| *count > 0)
}

/// The routed linears of the families whose shapes follow from `config.json`, for weights that don't show them.
fn derived(config: &Json) -> BTreeMap<String, [usize; 3]> {
    let mut linears = BTreeMap::new();
    let number = |field: &str| config.get(field).and_then(Json::as_int).and_then(|n| usize::try_from(n).ok());
    let (experts, inner) = match model_type(Some(config)) {
        Some("mixtral" | "gpt_oss") => (number("num_local_experts"), number("intermediate_size")),
        Some("qwen3_moe") => (number("num_experts"), number("moe_intermediate_size")),
        _ => return linears,
    };
    let fields = (experts, inner, number("hidden_size"), number("num_hidden_layers"));
    let (Some(experts), Some(inner), Some(hidden), Some(layers)) = fields else { return linears };
    let step = number("decoder_sparse_step").unwrap_or(1).max(1);
    let dense: Vec<usize> = match config.get("mlp_only_layers") {
        Some(Json::Array(layers)) => layers.iter().filter_map(Json::as_int).map(|layer| layer as usize).collect(),
        _ => Vec::new(),
    };
    // What a damaged file might say.
    if layers > 10_000 || experts > 1 << 20 {
        return linears;
    }
    for layer in (0..layers).filter(|layer| (layer + 1) % step == 0 && !dense.contains(layer)) {
        let path = format!("model.layers.{layer}.mlp.experts");
        linears.insert(format!("{path}.gate_up_proj"), [experts, hidden, 2 * inner]);
        linears.insert(format!("{path}.down_proj"), [experts, inner, hidden]);
    }
    linears
}

/// A base's routed linears.
#[derive(Clone, Debug, Default)]
pub(super) struct Routed {
    linears: Vec<ExpertLinear>,
    by_path: HashMap<Arc<str>, usize>,
    /// Linears of single experts that these are made of.
    parts: HashSet<String>,
    interleaved: bool,
    per_token: Option<usize>,
}

impl Routed {
    /// Those that weights show, and those that a config promises where weights don't show them.
    pub(super) fn new<'a>(
        config: Option<&Json>,
        weights: impl Iterator<Item = (&'a str, &'a [usize])> + Clone,
    ) -> Self {
        let mut found = find(config, weights.clone());
        let mut owners: HashSet<&str> = HashSet::new();
        let mut any = false;
        for (name, _) in weights {
            any = true;
            if let Some((path, _)) = name.split_once(".experts.") {
                owners.insert(path);
            }
        }
        let owner = |path: &str| path.split_once(".experts.").map_or(String::new(), |(owner, _)| owner.to_owned());
        let known: HashSet<String> = found.linears.keys().map(|path| owner(path)).collect();
        for (path, shape) in config.map(derived).unwrap_or_default() {
            let owner = owner(&path);
            if !known.contains(&owner) && (!any || owners.contains(&*owner)) {
                found.linears.entry(path).or_insert(shape);
            }
        }
        let (parts, per_token) = (found.singles.into_iter().collect(), config.and_then(per_token));
        Self { parts, per_token, ..Self::of(found.linears, interleaved(config)) }
    }

    /// Those that adapters have pairs for.
    pub(super) fn infer<'a>(pairs: impl Iterator<Item = &'a ExpertPair>) -> Loaded<Self> {
        let mut linears: BTreeMap<String, [usize; 3]> = BTreeMap::new();
        for pair in pairs {
            let shape = [pair.experts as usize, pair.in_features(), pair.out_features()];
            let known = linears.entry(pair.site.path.to_string()).or_insert(shape);
            if known[1..] != shape[1..] {
                let message = format!(
                    "experts of {}: one adapter has {} inputs and {} outputs, another {} and {}; they are for different bases",
                    pair.site.path, known[1], known[2], shape[1], shape[2]
                );
                return Err(Reject::new(Code::BaseConflict, message));
            }
            known[0] = known[0].max(shape[0]);
        }
        Ok(Self::of(linears, false))
    }

    fn of(found: BTreeMap<String, [usize; 3]>, interleaved: bool) -> Self {
        let mut all: Vec<_> = found.into_iter().collect();
        all.sort_by(|a, b| natural(&a.0, &b.0));
        let linear = |(path, [experts, in_features, out_features]): (String, [usize; 3])| ExpertLinear {
            site: SiteId::from_path(&path),
            experts,
            in_features,
            out_features,
        };
        let linears: Vec<_> = all.into_iter().map(linear).collect();
        let by_path = linears.iter().enumerate().map(|(i, linear)| (linear.site.path.clone(), i)).collect();
        Self { linears, by_path, parts: HashSet::new(), interleaved, per_token: None }
    }

    /// Whether a linear is one expert's part of these.
    pub(super) fn is_part(&self, path: &str) -> bool {
        self.parts.contains(path)
    }
}

impl BaseModel {
    /// Linears that each expert of a routed layer has for itself, in natural order of their paths.
    pub fn experts(&self) -> &[ExpertLinear] {
        &self.routed.linears
    }

    /// The routed linear at a path.
    pub fn expert(&self, path: &str) -> Option<&ExpertLinear> {
        self.routed.by_path.get(path).map(|index| &self.routed.linears[*index])
    }

    /// Experts of a layer that each token is sent to, where config.json says so (`num_experts_per_tok`, or what a family
    /// calls it).
    pub fn experts_per_token(&self) -> Option<usize> {
        self.routed.per_token
    }

    /// Whether gate and up of its experts lie element by element in one.
    pub(super) fn interleaves_experts(&self) -> bool {
        self.routed.interleaved
    }
}

#[cfg(test)]
mod tests {
    use super::super::json::Limits;
    use super::*;

    #[test]
    fn parameters_tell_by_their_shapes_which_way_they_lie() {
        let of = |list: &[(&str, [usize; 3])]| {
            let weights: Vec<_> = list.iter().map(|(name, shape)| (format!("l.0.experts.{name}"), *shape)).collect();
            find(None, weights.iter().map(|(name, shape)| (name.as_str(), &shape[..]))).linears
        };
        let rows = of(&[("gate_up_proj", [4, 40, 48]), ("down_proj", [4, 48, 20])]);
        assert_eq!(rows["l.0.experts.gate_up_proj"], [4, 48, 40]);
        assert_eq!(rows["l.0.experts.down_proj"], [4, 20, 48]);
        let columns = of(&[("gate_up_proj", [4, 48, 40]), ("down_proj", [4, 20, 48])]);
        assert_eq!(columns, rows);
        // The inner width is that of the model: only the two together tell.
        let rows = of(&[("gate_up_proj", [2, 64, 32]), ("down_proj", [2, 32, 32])]);
        assert_eq!(rows["l.0.experts.gate_up_proj"], [2, 32, 64]);
    }

    #[test]
    fn a_config_alone_tells_both_linears_of_each_routed_layer() {
        let text = r#"{"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 20, "hidden_size": 48,
            "num_hidden_layers": 2}"#;
        let config = Json::parse("config.json", text, Limits { bytes: 1 << 10, values: 16 }).unwrap();
        let routed = Routed::new(Some(&config), std::iter::empty());
        let shapes = routed.linears.iter().map(|linear| (linear.in_features, linear.out_features));
        assert!(shapes.eq([(20, 48), (48, 40), (20, 48), (48, 40)]));
        assert!(routed.linears[1].reads_tokens() && !routed.linears[2].reads_tokens());
        // Of a layer whose weights are there, they tell.
        let weight = ("model.layers.1.mlp.experts.gate_up_proj", &[4, 40, 48][..]);
        let routed = Routed::new(Some(&config), [weight].into_iter());
        assert_eq!(routed.linears.len(), 1);
    }

    #[test]
    fn a_config_tells_how_many_experts_a_token_has_by_its_familys_name_for_it() {
        let of =
            |text: &str| per_token(&Json::parse("config.json", text, Limits { bytes: 1 << 10, values: 16 }).unwrap());
        assert_eq!(of(r#"{"num_experts_per_tok": 8, "num_experts": 128}"#), Some(8));
        assert_eq!(of(r#"{"text_config": {"moe_k": 6}}"#), Some(6));
        assert_eq!(of(r#"{"num_experts": 128}"#), None);
        assert_eq!(of(r#"{"num_experts_per_tok": 0}"#), None);
    }

    #[test]
    fn linears_of_single_experts_are_one_routed_linear_where_all_are_there() {
        let names: Vec<String> = (0..3).map(|e| format!("m.layers.1.block_sparse_moe.experts.{e}.w1.weight")).collect();
        let found = find(None, names.iter().map(|name| (name.as_str(), &[20, 48][..])));
        assert_eq!(found.linears["m.layers.1.block_sparse_moe.experts.w1"], [3, 48, 20]);
        assert_eq!(found.singles.len(), 3);
        let gap = find(None, names[1..].iter().map(|name| (name.as_str(), &[20, 48][..])));
        assert!(gap.linears.is_empty() && gap.singles.is_empty());
    }
}
