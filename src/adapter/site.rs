//! Sites: the linears of a model that an adapter may adapt.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

/// Which linear of a layer. The usual ones have names; any other is known by its path in the layer.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LoraModule {
    /// `q_proj`
    QProj,
    /// `k_proj`
    KProj,
    /// `v_proj`
    VProj,
    /// `o_proj`
    OProj,
    /// `qkv_proj`: q, k and v in one linear.
    QkvProj,
    /// `gate_proj`
    GateProj,
    /// `up_proj`
    UpProj,
    /// `gate_up_proj`: gate and up in one linear.
    GateUpProj,
    /// `down_proj`
    DownProj,
    /// `out_proj` of a linear-attention layer.
    OutProj,
    /// Any other linear: its path after the layer index (`attention.output.dense`), or its whole path
    /// outside of layers, with `*` for the index where another stack has a module of the same name.
    Other(Arc<str>),
}

impl fmt::Display for LoraModule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LoraModule::QProj => "q_proj",
            LoraModule::KProj => "k_proj",
            LoraModule::VProj => "v_proj",
            LoraModule::OProj => "o_proj",
            LoraModule::QkvProj => "qkv_proj",
            LoraModule::GateProj => "gate_proj",
            LoraModule::UpProj => "up_proj",
            LoraModule::GateUpProj => "gate_up_proj",
            LoraModule::DownProj => "down_proj",
            LoraModule::OutProj => "out_proj",
            LoraModule::Other(path) => path,
        })
    }
}

impl Serialize for LoraModule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A site: global layer index, module, and the base's own module path that the two stand for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct SiteId {
    /// Global layer index; 0 for a module outside of layers.
    pub layer: usize,
    /// Which linear of the layer.
    pub module: LoraModule,
    /// The base's module path: `model.layers.0.self_attn.q_proj`.
    #[serde(rename = "site")]
    pub path: Arc<str>,
}

/// Parts of a path before the layer index that belong to a model's main stack. Any other stack (vision towers,
/// encoders beside a decoder) has its whole path as module name, so that the same module has the same name in every
/// adapter, whichever stacks the adapter covers.
const MAIN_STACK: &[&str] = &[
    "base_model",
    "model",
    "language_model",
    "text_model",
    "transformer",
    "decoder",
    "backbone",
    "gpt_neox",
    "llm",
    "thinker",
    "bert",
    "roberta",
    "distilbert",
    "electra",
    "deberta",
    "albert",
    "camembert",
    "xlm_roberta",
    "mpnet",
    "esm",
];

impl SiteId {
    /// The site of a module path by the path alone: its first number is the layer.
    pub fn from_path(path: &str) -> Self {
        let Some((before, layer, rest)) = layer_of(path) else {
            return Self { layer: 0, module: LoraModule::Other(path.into()), path: path.into() };
        };
        let mut segments = before.rsplit('.');
        let stack = segments.next().unwrap_or_default();
        // `encoder.layer` is the main stack of BERT and its kin; `encoder.layers` stands beside a decoder.
        let main = segments.all(|s| MAIN_STACK.contains(&s) || (s == "encoder" && stack == "layer"));
        let module = if main { LoraModule::in_layer(rest) } else { starred(before, rest) };
        Self { layer, module, path: path.into() }
    }

    /// The sites of a model's module paths. No two have the same layer and module: where the paths alone would name
    /// two of them alike, the later one in order of paths is known by its whole path.
    pub(crate) fn of_paths<'a>(paths: impl IntoIterator<Item = &'a str>) -> Vec<Self> {
        let mut sites: Vec<_> = paths.into_iter().map(Self::from_path).collect();
        let mut order: Vec<_> = (0..sites.len()).collect();
        order.sort_by(|a, b| sites[*a].path.cmp(&sites[*b].path));
        let mut seen = HashSet::new();
        for index in order {
            let site = &mut sites[index];
            if !seen.insert((site.layer, site.module.clone())) {
                site.module = match layer_of(&site.path) {
                    Some((before, _, rest)) => starred(before, rest),
                    None => LoraModule::Other(format!("*.{}", site.path).into()),
                };
                seen.insert((site.layer, site.module.clone()));
            }
        }
        sites
    }
}

impl LoraModule {
    /// The name of a module by its path in a layer.
    fn in_layer(rest: &str) -> Self {
        let (parent, leaf) = rest.rsplit_once('.').unwrap_or(("", rest));
        match (parent, leaf) {
            ("self_attn" | "attn" | "attention", "q_proj") => LoraModule::QProj,
            ("self_attn" | "attn" | "attention", "k_proj") => LoraModule::KProj,
            ("self_attn" | "attn" | "attention", "v_proj") => LoraModule::VProj,
            ("self_attn" | "attn" | "attention", "o_proj") => LoraModule::OProj,
            ("self_attn" | "attn" | "attention", "qkv_proj") => LoraModule::QkvProj,
            ("mlp" | "feed_forward", "gate_proj") => LoraModule::GateProj,
            ("mlp" | "feed_forward", "up_proj") => LoraModule::UpProj,
            ("mlp" | "feed_forward", "gate_up_proj") => LoraModule::GateUpProj,
            ("mlp" | "feed_forward", "down_proj") => LoraModule::DownProj,
            ("linear_attn", "out_proj") => LoraModule::OutProj,
            _ => LoraModule::Other(rest.into()),
        }
    }
}

/// `model.vision.layers.*.q_proj`
fn starred(before: &str, rest: &str) -> LoraModule {
    LoraModule::Other(format!("{before}.*.{rest}").into())
}

/// A path around its first whole number: `model.layers`, 3, `mlp.up_proj`.
fn layer_of(path: &str) -> Option<(&str, usize, &str)> {
    let mut start = 0;
    for segment in path.split('.') {
        let end = start + segment.len();
        let number = !segment.is_empty()
            && segment.bytes().all(|b| b.is_ascii_digit())
            && (segment == "0" || !segment.starts_with('0'));
        if let (true, Ok(layer)) = (number, segment.parse())
            && start > 0
            && end < path.len()
        {
            return Some((&path[..start - 1], layer, &path[end + 1..]));
        }
        start = end + 1;
    }
    None
}

/// Order of module paths in which numbers count as numbers: layer 2 before layer 10.
pub(crate) fn natural(a: &str, b: &str) -> std::cmp::Ordering {
    let number = |s: &str| s.parse::<u64>().ok();
    let (mut left, mut right) = (a.split('.'), b.split('.'));
    loop {
        let order = match (left.next(), right.next()) {
            (None, None) => return a.cmp(b),
            (None, Some(_)) => return std::cmp::Ordering::Less,
            (Some(_), None) => return std::cmp::Ordering::Greater,
            (Some(l), Some(r)) => match (number(l), number(r)) {
                (Some(m), Some(n)) => m.cmp(&n),
                _ => l.cmp(r),
            },
        };
        if order.is_ne() {
            return order;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(path: &str) -> (usize, String) {
        let site = SiteId::from_path(path);
        assert_eq!(&*site.path, path);
        (site.layer, site.module.to_string())
    }

    #[test]
    fn the_usual_modules_have_their_short_names() {
        assert_eq!(named("model.layers.12.self_attn.q_proj"), (12, "q_proj".into()));
        assert_eq!(SiteId::from_path("model.layers.12.self_attn.q_proj").module, LoraModule::QProj);
        assert_eq!(named("model.language_model.layers.1.mlp.gate_up_proj"), (1, "gate_up_proj".into()));
        assert_eq!(named("transformer.h.1.attn.c_attn"), (1, "attn.c_attn".into()));
        assert_eq!(named("bert.encoder.layer.1.attention.self.query"), (1, "attention.self.query".into()));
        assert_eq!(named("layers.3.self_attn.k_proj"), (3, "k_proj".into()));
        assert_eq!(named("lm_head"), (0, "lm_head".into()));
        assert_eq!(named("score.2"), (0, "score.2".into()));
    }

    #[test]
    fn other_stacks_are_known_by_their_whole_path() {
        let vision = "model.vision_tower.encoder.layers.0.self_attn.q_proj";
        assert_eq!(named(vision), (0, "model.vision_tower.encoder.layers.*.self_attn.q_proj".into()));
        assert_eq!(named("model.encoder.layers.0.self_attn.q_proj").1, "model.encoder.layers.*.self_attn.q_proj");
    }

    #[test]
    fn no_two_sites_of_a_model_have_one_name() {
        let paths = [
            "transformer.h.0.mlp.up_proj",
            "model.layers.0.mlp.up_proj",
            "model.layers.0.cross.lm_head",
            "cross.lm_head",
        ];
        let sites = SiteId::of_paths(paths);
        let names: HashSet<_> = sites.iter().map(|s| (s.layer, s.module.clone())).collect();
        assert_eq!(names.len(), paths.len());
        assert_eq!(sites[1].module, LoraModule::UpProj);
        assert_eq!(sites[0].module.to_string(), "transformer.h.*.mlp.up_proj");
    }

    #[test]
    fn natural_order_counts() {
        assert!(natural("a.2.b", "a.10.b").is_lt());
        assert!(natural("a.2", "a.2.b").is_lt());
        assert!(natural("a", "a").is_eq());
    }
}
