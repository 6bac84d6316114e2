//! Pairs of routed experts: from the tensors of an adapter to a pair for each expert.
//!
//! PEFT adapts a parameter of all experts (`target_parameters`) by one pair of linears: row `e * r + j` of `lora_A` is row
//! `j` of expert `e`'s A, column `j * experts + e` of `lora_B` column `j` of its B. Parameters of one module are wrapped one
//! around the other in the order in which the module has them, so that the outermost, `experts.lora_A`, is the last, and
//! each `base_layer` leads to the one before. Adapters of before that have a pair of linears for each expert, under the
//! names that the model had then (`block_sparse_moe.experts.3.w1`).

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use super::base::BaseModel;
use super::config::Scales;
use super::expert::ExpertPair;
use super::header::TensorInfo;
use super::load::CONFIG;
use super::pattern::names;
use super::reading::Reading;
use super::reject::{Code, Loaded, Reject};
use super::resolve::unwrapped;
use super::routed::{ExpertLinear, Role, is_experts, single};
use super::site::{SiteId, natural};
use super::stack::{Block, stack};
use super::weights::HostMatrix;
use crate::contract::MAX_RANK;

/// Modules that hold experts and are other names of one another.
const OWNERS: [&str; 2] = ["mlp", "block_sparse_moe"];

/// Whether a module of a key is of experts.
pub(super) fn is_routed(module: &str) -> bool {
    module.split('.').any(|segment| segment == "experts")
}

/// Whether a module of a key is a parameter of all experts.
pub(super) fn is_parameter(module: &str) -> bool {
    matches!(Module::parse(module), Some(Module::Parameter { .. }))
}

/// A key's module, taken apart.
#[derive(Clone, Copy)]
enum Module<'a> {
    /// All experts, `depth` wrappers below the outermost.
    Parameter { parent: &'a str, depth: usize },
    /// One expert's linear.
    Single { parent: &'a str, expert: usize, leaf: &'a str },
}

impl<'a> Module<'a> {
    fn parse(module: &'a str) -> Option<Self> {
        if let Some((parent, expert, leaf)) = single(module) {
            return Some(Self::Single { parent, expert, leaf });
        }
        let (mut parent, mut depth) = (module, 0);
        while let Some(outer) = parent.strip_suffix(".base_layer") {
            (parent, depth) = (outer, depth + 1);
        }
        is_experts(parent).then_some(Self::Parameter { parent, depth })
    }
}

/// A module's tensors and what they are for.
pub(super) struct Sides<'a> {
    pub module: &'a str,
    pub a: &'a TensorInfo,
    pub b: &'a TensorInfo,
}

/// One expert's matrices at a linear of the adapter.
struct Piece {
    expert: usize,
    a: HostMatrix,
    b: HostMatrix,
}

/// What the adapter has for a linear of all experts.
struct Part<'a> {
    /// The path of the experts in the adapter.
    parent: &'a str,
    leaf: String,
    role: Role,
    /// Experts, where the tensors tell.
    experts: Option<usize>,
    pieces: Vec<(Piece, f32)>,
    /// A key of it, for messages.
    tensor: &'a TensorInfo,
}

impl<'a> Reading<'a> {
    /// The pairs of experts, in natural order of their paths, and where each module's tensors went.
    pub(super) fn experts(
        &mut self,
        modules: Vec<Sides<'a>>,
        scales: &Scales<'_>,
        mut scale_of: impl FnMut(&Self, &'a str, usize, f64) -> Loaded<f64>,
    ) -> Loaded<(Vec<ExpertPair>, HashMap<&'a str, String>)> {
        let mut parts: Vec<Part<'a>> = Vec::new();
        let mut owners: Vec<(&'a str, usize)> = Vec::new();
        let mut depths: BTreeMap<&str, usize> = BTreeMap::new();
        for sides in &modules {
            if let Some(Module::Parameter { parent, depth }) = Module::parse(sides.module) {
                let most = depths.entry(parent).or_default();
                *most = (*most).max(depth);
            }
        }
        for Sides { module, a, b } in modules {
            match Module::parse(module) {
                None => return Err(self.unknown_experts(a, module)),
                Some(Module::Parameter { parent, depth }) => {
                    let name = self.parameter_at(a, parent, depth, depths[parent])?;
                    let Some(role) = Role::of(&name) else { return Err(self.unknown_experts(a, module)) };
                    let path = format!("{parent}.{name}");
                    let (rank, scale) = scales.of(&path).map_err(|e| self.pattern(e))?;
                    let scale = scale_of(self, module, rank, scale)?;
                    let scale = self.narrow_scale(&path, scale)?;
                    let (experts, pieces) = self.split(a, b, &path, rank)?;
                    let pieces = pieces.into_iter().map(|piece| (piece, scale)).collect();
                    owners.push((module, parts.len()));
                    parts.push(Part { parent, leaf: name, role, experts: Some(experts), pieces, tensor: a });
                }
                Some(Module::Single { parent, expert, leaf }) => {
                    let Some(role) = Role::of(leaf) else { return Err(self.unknown_experts(a, module)) };
                    let (rank, scale) = scales.of(module).map_err(|e| self.pattern(e))?;
                    self.check_pair(module, a, b, rank)?;
                    let scale = scale_of(self, module, rank, scale)?;
                    let scale = self.narrow_scale(module, scale)?;
                    let piece = Piece { expert, a: self.matrix(a)?, b: self.matrix(b)? };
                    let known = parts
                        .iter()
                        .position(|part| part.parent == parent && part.leaf == leaf && part.experts.is_none());
                    let at = known.unwrap_or_else(|| {
                        let (leaf, pieces) = (leaf.to_owned(), Vec::new());
                        parts.push(Part { parent, leaf, role, experts: None, pieces, tensor: a });
                        parts.len() - 1
                    });
                    owners.push((module, at));
                    parts[at].pieces.push((piece, scale));
                }
            }
        }
        let mut sites = vec![String::new(); parts.len()];
        let mut pairs = match self.base {
            Some(base) => self.place(base, parts, &mut sites)?,
            None => self.alone(parts, &mut sites),
        };
        pairs.sort_by(|a, b| natural(&a.site.path, &b.site.path).then(a.expert.cmp(&b.expert)));
        if let Some([one, _]) = pairs.array_windows().find(|[a, b]| a.site.path == b.site.path && a.expert == b.expert)
        {
            let message =
                format!("{}: expert {} of {} has two pairs, expected one", self.source.name, one.expert, one.site.path);
            return Err(Reject::new(Code::TensorDuplicate, message));
        }
        let paths = owners.into_iter().map(|(module, part)| (module, sites[part].clone())).collect();
        Ok((pairs, paths))
    }

    /// PEFT has neither DoRA nor biases on parameters; on single experts they would have to survive being joined.
    pub(super) fn check_plain_experts(&self, first: Option<&TensorInfo>) -> Loaded<()> {
        let Some(tensor) = first else { return Ok(()) };
        for (asked, field, code) in
            [(self.config.use_dora, "use_dora", Code::Dora), (self.config.lora_bias, "lora_bias", Code::LoraBias)]
        {
            if asked {
                let message = format!(
                    "{} is for experts, and {CONFIG} says {field}; expected plain LoRA on experts",
                    self.at(tensor)
                );
                return Err(Reject::new(code, message));
            }
        }
        Ok(())
    }

    fn unknown_experts(&self, tensor: &TensorInfo, module: &str) -> Box<Reject> {
        let message = format!(
            "{} is for {module}, expected the experts of a layer (`...experts`, with `.base_layer` for each parameter but the \
             last), or a linear of one (`...experts.N.gate_proj`)",
            self.at(tensor)
        );
        Reject::new(Code::ExpertLora, message)
    }

    /// Which parameter of the experts at `parent` the wrapper `depth` below the outermost is of.
    fn parameter_at(&self, tensor: &TensorInfo, parent: &str, depth: usize, deepest: usize) -> Loaded<String> {
        // In the order in which models have them.
        let known = ["gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"];
        let wanted = &self.config.target_parameters;
        let targeted: Vec<&str> = known
            .into_iter()
            .filter(|name| wanted.iter().any(|entry| names(entry, &format!("{parent}.{name}"))))
            .collect();
        if targeted.len() != deepest + 1 {
            let message = format!(
                "{} is for {parent}, where tensors are of {} parameters and target_parameters {wanted:?} names {}",
                self.at(tensor),
                deepest + 1,
                if targeted.is_empty() { "none that is known".to_owned() } else { targeted.join(", ") }
            );
            return Err(Reject::new(Code::ExpertLora, message));
        }
        Ok(targeted[targeted.len() - 1 - depth].to_owned())
    }

    /// The experts' matrices in the two of a parameter.
    fn split(&self, a: &TensorInfo, b: &TensorInfo, path: &str, rank: usize) -> Loaded<(usize, Vec<Piece>)> {
        for (tensor, expected) in [(a, "[experts * rank, in]"), (b, "[out, rank * experts]")] {
            if tensor.shape.len() != 2 || tensor.shape.contains(&0) {
                let message = format!("{} has shape {:?}, expected {expected}", self.at(tensor), tensor.shape);
                return Err(Reject::new(Code::TensorShape, message));
            }
        }
        let (rows, columns) = (a.shape[0], b.shape[1]);
        if rows != columns {
            let message = format!(
                "{} has {rows} rows and lora_B {columns} columns, expected experts times rank {rank} of both",
                self.at(a)
            );
            return Err(Reject::new(Code::TensorShape, message));
        }
        if rank > MAX_RANK as usize {
            let message = format!("{} has rank {rank}, expected at most {MAX_RANK}", self.at(a));
            return Err(Reject::new(Code::RankLimit, message));
        }
        if !rows.is_multiple_of(rank) {
            let message = format!(
                "{} has {rows} rows, no multiple of the rank {rank} that the config (r or rank_pattern) gives {path}",
                self.at(a)
            );
            return Err(Reject::new(Code::RankMismatch, message));
        }
        let experts = rows / rank;
        let (a, b) = (self.matrix(a)?, self.matrix(b)?);
        let piece = |expert: usize| Piece {
            expert,
            a: rows_of(&a, expert * rank..(expert + 1) * rank),
            b: gather(&b, 0..b.rows, |j| j * experts + expert, rank),
        };
        Ok((experts, (0..experts).map(piece).collect()))
    }

    /// Pairs without a base: under the adapter's own paths.
    fn alone(&self, parts: Vec<Part<'a>>, sites: &mut [String]) -> Vec<ExpertPair> {
        let mut pairs = Vec::new();
        for (part, site) in parts.into_iter().zip(sites) {
            *site = format!("{}.{}", part.parent, part.leaf);
            let seen = part.pieces.iter().map(|(piece, _)| piece.expert + 1).max().unwrap_or(0);
            let (id, experts) = (SiteId::from_path(site), part.experts.unwrap_or(seen) as u32);
            pairs.extend(part.pieces.into_iter().map(|(Piece { expert, a, b }, scale)| ExpertPair {
                site: id.clone(),
                expert: expert as u32,
                experts,
                a,
                b,
                scale,
            }));
        }
        pairs
    }

    /// Pairs as the base has its linears: where it has gate and up in one that the adapter has apart, they are joined, and
    /// split where it is the other way round.
    fn place(&mut self, base: &BaseModel, parts: Vec<Part<'a>>, sites: &mut [String]) -> Loaded<Vec<ExpertPair>> {
        let mut owners: BTreeMap<&str, Vec<&ExpertLinear>> = BTreeMap::new();
        for linear in base.experts() {
            let path = &linear.site.path;
            owners.entry(path.rsplit_once('.').map_or("", |(parent, _)| parent)).or_default().push(linear);
        }
        let mut by_tail: HashMap<String, Vec<&str>> = HashMap::new();
        owners.keys().for_each(|parent| by_tail.entry(tail(parent)).or_default().push(parent));
        let mut pairs = Vec::new();
        // By linear and expert, what is to be joined: the rows in its B.
        let mut joins: BTreeMap<(Arc<str>, usize), Vec<Half>> = BTreeMap::new();
        let (mut moved, mut joined, mut apart) = (None, None, None);
        for (part, site) in parts.into_iter().zip(sites) {
            let parent = match owners.contains_key(part.parent) {
                true => part.parent,
                false => match by_tail.get(&tail(part.parent)).map(Vec::as_slice) {
                    Some([parent]) => {
                        moved = Some((part.parent, *parent));
                        *parent
                    }
                    Some([one, two, ..]) => {
                        let message = format!(
                            "{} could be for {one} or {two} of {}, expected one place",
                            self.at(part.tensor),
                            base.source()
                        );
                        return Err(Reject::new(Code::Prefix, message));
                    }
                    _ => {
                        let message = format!(
                            "{}: no experts {} in {}, which has them in {} layers",
                            self.at(part.tensor),
                            part.parent,
                            base.source(),
                            owners.len()
                        );
                        return Err(Reject::new(Code::NotInBase, message));
                    }
                },
            };
            let of = |role: Role| {
                let role_of = |linear: &ExpertLinear| linear.site.path.rsplit('.').next().and_then(Role::of);
                owners[parent].iter().copied().find(|linear| role_of(linear) == Some(role))
            };
            let place = match (of(part.role), part.role, of(Role::GateUp)) {
                (Some(linear), ..) => Place::Whole(linear),
                (None, Role::Gate, Some(linear)) => Place::Rows(linear, 0),
                (None, Role::Up, Some(linear)) => Place::Rows(linear, 1),
                (None, Role::GateUp, _) => match (of(Role::Gate), of(Role::Up)) {
                    (Some(gate), Some(up)) => Place::Apart(gate, up),
                    _ => return Err(self.no_linear(&part, parent, base)),
                },
                _ => return Err(self.no_linear(&part, parent, base)),
            };
            *site = match &place {
                Place::Whole(linear) | Place::Rows(linear, _) => linear.site.path.to_string(),
                Place::Apart(..) => format!("{parent}.{}", part.leaf),
            };
            if let (Place::Rows(linear, _), true) = (&place, base.interleaves_experts()) {
                let message = format!(
                    "{} is for {} of an expert; {} has it in {}, gate and up element by element, which no pair of one of them \
                     is known to fit",
                    self.at(part.tensor),
                    part.leaf,
                    base.source(),
                    linear.site.path
                );
                return Err(Reject::new(Code::FusedMismatch, message));
            }
            for (piece, scale) in part.pieces {
                let widths = |linear: &ExpertLinear, outputs: usize| {
                    self.fit_experts(part.tensor, part.experts, piece.expert, linear, outputs, &piece.a, &piece.b)
                };
                let pair = |linear: &ExpertLinear, a: HostMatrix, b: HostMatrix| ExpertPair {
                    site: linear.site.clone(),
                    expert: piece.expert as u32,
                    experts: linear.experts as u32,
                    a,
                    b,
                    scale,
                };
                match &place {
                    Place::Whole(linear) => {
                        let exchanged = widths(linear, linear.out_features)?;
                        let (a, b) = if exchanged { (flip(&piece.b), flip(&piece.a)) } else { (piece.a, piece.b) };
                        pairs.push(pair(linear, a, b));
                    }
                    Place::Rows(linear, half) => {
                        let height = linear.out_features / 2;
                        widths(linear, height)?;
                        joined = Some((part.leaf.clone(), linear.site.path.clone()));
                        let rows = half * height..(half + 1) * height;
                        let key = (linear.site.path.clone(), piece.expert);
                        joins.entry(key).or_default().push((pair(linear, piece.a, piece.b), rows));
                    }
                    Place::Apart(gate, up) => {
                        let exchanged = widths(gate, gate.out_features + up.out_features)?;
                        let (a, b) = if exchanged { (flip(&piece.b), flip(&piece.a)) } else { (piece.a, piece.b) };
                        apart = Some((part.leaf.clone(), gate.site.path.clone()));
                        let middle = gate.out_features;
                        for (linear, rows) in [(gate, 0..middle), (up, middle..b.rows)] {
                            pairs.push(pair(linear, a.clone(), rows_of(&b, rows)));
                        }
                    }
                }
            }
        }
        for ((path, expert), parts) in joins {
            let Some(linear) = base.expert(&path) else { continue };
            let rank: usize = parts.iter().map(|(pair, _)| pair.rank()).sum();
            if rank > MAX_RANK as usize {
                let message = format!(
                    "{}: gate and up of expert {expert} are one linear, {path}, in {}, so that their ranks add up to {rank}, \
                     expected at most {MAX_RANK}",
                    self.source.name,
                    base.source()
                );
                return Err(Reject::new(Code::RankLimit, message));
            }
            if let [one, two] = &parts[..]
                && one.1 == two.1
            {
                let message = format!("{}: expert {expert} of {path} has two pairs, expected one", self.source.name);
                return Err(Reject::new(Code::TensorDuplicate, message));
            }
            let blocks: Vec<_> = parts
                .iter()
                .map(|(pair, rows)| Block { a: &pair.a, b: &pair.b, first_row: rows.start, scale: pair.scale.into() })
                .collect();
            let (a, b, scale) = stack(&blocks, linear.out_features);
            let (site, experts) = (linear.site.clone(), linear.experts as u32);
            pairs.push(ExpertPair { site, expert: expert as u32, experts, a, b, scale });
        }
        if let Some((from, to)) = moved {
            self.note("N_EXPERTS_MOVED", format!("experts {from} were taken for {to} of {}", base.source()));
        }
        if let Some((leaf, whole)) = joined {
            let message = format!(
                "{} has gate and up of experts in one that the adapter has apart; joined, ranks added up: {leaf} into {whole}",
                base.source()
            );
            self.note("N_FUSED_JOINED", message);
        }
        if let Some((leaf, linear)) = apart {
            let message = format!(
                "{} has gate and up of experts apart that the adapter has in one; B's rows were split: {leaf} for {linear}",
                base.source()
            );
            self.note("N_FUSED_SPLIT", message);
        }
        Ok(pairs)
    }

    fn no_linear(&self, part: &Part<'_>, parent: &str, base: &BaseModel) -> Box<Reject> {
        let message = format!("{}: experts {parent} of {} have no {}", self.at(part.tensor), base.source(), part.leaf);
        Reject::new(Code::NotInBase, message)
    }

    /// Checks one expert's matrices against a linear of `outputs` outputs; whether the two are exchanged, as PEFT before
    /// 0.19 saved those of parameters that are kept `[experts][out][in]`.
    #[allow(clippy::too_many_arguments)]
    fn fit_experts(
        &self,
        tensor: &TensorInfo,
        experts: Option<usize>,
        expert: usize,
        linear: &ExpertLinear,
        outputs: usize,
        a: &HostMatrix,
        b: &HostMatrix,
    ) -> Loaded<bool> {
        if experts.is_some_and(|experts| experts != linear.experts) || expert >= linear.experts {
            let found = experts.map_or(format!("expert {expert}"), |experts| format!("{experts} experts"));
            let message = format!(
                "{} is of {found}, expected {} experts, as {} of {} has",
                self.at(tensor),
                linear.experts,
                linear.site.path,
                self.base.map_or("", BaseModel::source)
            );
            return Err(Reject::new(Code::BaseShape, message));
        }
        match (a.cols, b.rows) {
            widths if widths == (linear.in_features, outputs) => Ok(false),
            widths if experts.is_some() && widths == (outputs, linear.in_features) => Ok(true),
            (inputs, rows) => {
                let message = format!(
                    "{} has {inputs} columns and lora_B {rows} rows, expected {} and {outputs}: the inputs and outputs of an \
                     expert at {} of {}",
                    self.at(tensor),
                    linear.in_features,
                    linear.site.path,
                    self.base.map_or("", BaseModel::source)
                );
                Err(Reject::new(Code::BaseShape, message))
            }
        }
    }
}

/// A pair of gate or up, and the rows that are its own in a linear of both.
type Half = (ExpertPair, Range<usize>);

/// Where a linear of an adapter's experts goes in a base.
enum Place<'b> {
    Whole(&'b ExpertLinear),
    /// The first or the second half of the rows.
    Rows(&'b ExpertLinear, usize),
    /// Gate and up, from one that is both.
    Apart(&'b ExpertLinear, &'b ExpertLinear),
}

/// A path of experts without what only says how a model is wrapped, under one name of their owner.
fn tail(parent: &str) -> String {
    let same = |segment| if OWNERS.contains(&segment) { OWNERS[0] } else { segment };
    unwrapped(parent).split('.').map(same).collect::<Vec<_>>().join(".")
}

/// Some rows of a matrix.
fn rows_of(matrix: &HostMatrix, rows: Range<usize>) -> HostMatrix {
    let row = matrix.cols * matrix.dtype.size() as usize;
    let bytes = matrix.bytes[rows.start * row..rows.end * row].to_vec();
    HostMatrix { dtype: matrix.dtype, rows: rows.len(), cols: matrix.cols, bytes }
}

/// Some rows of a matrix, of each the columns that `column` names.
fn gather(matrix: &HostMatrix, rows: Range<usize>, column: impl Fn(usize) -> usize, cols: usize) -> HostMatrix {
    let size = matrix.dtype.size() as usize;
    let mut bytes = Vec::with_capacity(rows.len() * cols * size);
    for row in rows.clone() {
        for i in 0..cols {
            let at = (row * matrix.cols + column(i)) * size;
            bytes.extend_from_slice(&matrix.bytes[at..at + size]);
        }
    }
    HostMatrix { dtype: matrix.dtype, rows: rows.len(), cols, bytes }
}

/// A matrix transposed.
fn flip(matrix: &HostMatrix) -> HostMatrix {
    let size = matrix.dtype.size() as usize;
    let mut bytes = Vec::with_capacity(matrix.bytes.len());
    for column in 0..matrix.cols {
        for row in 0..matrix.rows {
            let at = (row * matrix.cols + column) * size;
            bytes.extend_from_slice(&matrix.bytes[at..at + size]);
        }
    }
    HostMatrix { dtype: matrix.dtype, rows: matrix.cols, cols: matrix.rows, bytes }
}
