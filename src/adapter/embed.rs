//! The parts of an adapter that are about tokens: whole tables and replaced rows, from its tensors and its config.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::base_modules::{is_head, is_input};
use super::config::TokenIndices;
use super::header::TensorInfo;
use super::json::excerpt;
use super::judge::Use;
use super::keys::Key;
use super::load::CONFIG;
use super::pattern::names;
use super::reading::Reading;
use super::reject::{Code, Loaded, Reject};
use super::site::SiteId;
use super::tokens::{HostTokens, RawTokens, ServedTables};
use super::weights::{Adapter, HostPair};

/// The tensors of one table.
#[derive(Clone, Copy, Default)]
pub(super) struct Parts<'t> {
    /// Saved whole.
    table: Option<&'t TensorInfo>,
    /// Rows of trained tokens.
    rows: Option<&'t TensorInfo>,
}

impl<'t> Parts<'t> {
    /// A tensor of these, for messages.
    pub fn any(&self) -> Option<&'t TensorInfo> {
        self.table.or(self.rows)
    }
}

/// Names of modules whose weight is a table of tokens.
const TABLES: &[&str] =
    &["embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "shared", "decoder"];

/// Whether the module at a path is an embedding of tokens or a head, by its name.
pub(super) fn is_table(module: &str) -> bool {
    TABLES.contains(&module.rsplit('.').next().unwrap_or(module))
}

impl Reading<'_> {
    /// The tensors of tables, by module.
    pub(super) fn tables<'t>(
        &self,
        tensors: &'t [TensorInfo],
        keys: &[Key<'t>],
        uses: &[Use],
    ) -> Loaded<BTreeMap<&'t str, Parts<'t>>> {
        let mut tables: BTreeMap<&str, Parts<'_>> = BTreeMap::new();
        for ((tensor, key), used) in tensors.iter().zip(keys).zip(uses) {
            let parts = match used {
                Use::Table | Use::TokenRows => tables.entry(key.module).or_default(),
                _ => continue,
            };
            let part = if matches!(used, Use::Table) { &mut parts.table } else { &mut parts.rows };
            if let Some(first) = part.replace(tensor) {
                let message =
                    format!("{} and {:?} are the same part of one module", self.at(first), excerpt(&tensor.name));
                return Err(Reject::new(Code::TensorDuplicate, message));
            }
            let shape = &tensor.shape;
            if shape.len() != 2 || shape.contains(&0) {
                let code = if shape.contains(&0) { Code::TensorEmpty } else { Code::TensorShape };
                let message = format!("{} has shape {shape:?}, expected [tokens, width]", self.at(tensor));
                return Err(Reject::new(code, message));
            }
        }
        self.check_indices(&tables)?;
        Ok(tables)
    }

    /// `trainable_token_indices` without rows of theirs.
    fn check_indices(&self, tables: &BTreeMap<&str, Parts<'_>>) -> Loaded<()> {
        let trained: Vec<&str> = tables.iter().filter(|(_, parts)| parts.rows.is_some()).map(|(m, _)| *m).collect();
        let missing = match &self.config.trainable_token_indices {
            None => None,
            Some(TokenIndices::List(_)) => trained.is_empty().then_some("the input embedding"),
            // A head that is tied to an embedding has its rows.
            Some(TokenIndices::ByModule(indices)) => indices
                .keys()
                .find(|key| {
                    let tied = is_head(key) && trained.iter().any(|module| is_input(module));
                    !tied && !trained.iter().any(|module| names(key, module))
                })
                .map(String::as_str),
        };
        let Some(module) = missing else { return Ok(()) };
        let message = format!(
            "{CONFIG} beside {}: trainable_token_indices names tokens of {module:?}, but no rows of theirs were saved: {}",
            self.source.name,
            Code::TrainableTokens.describe()
        );
        Err(Reject::new(Code::TrainableTokens, message))
    }

    /// The tokens that were trained at a module, one for each of its rows.
    fn trained(&self, module: &str, tensor: &TensorInfo) -> Loaded<Vec<u32>> {
        let refuse = |what: String| {
            let message = format!("{}: {what}: {}", self.at(tensor), Code::TrainableTokens.describe());
            Err(Reject::new(Code::TrainableTokens, message))
        };
        let input = match self.base.and_then(|base| base.input_embedding()) {
            Some(embedding) => *embedding.site.path == *module,
            None => is_input(module),
        };
        let ids = match &self.config.trainable_token_indices {
            Some(TokenIndices::List(ids)) if input => ids,
            Some(TokenIndices::List(_)) => {
                return refuse("the config's list of token ids is for the input embedding".to_owned());
            }
            Some(TokenIndices::ByModule(indices)) => {
                let mut found = indices.iter().filter(|(key, _)| names(key, module));
                match (found.next(), found.next()) {
                    (Some((_, ids)), None) => ids,
                    (None, _) => return refuse(format!("the config names no token ids for {module}")),
                    (Some((one, _)), Some((two, _))) => {
                        return refuse(format!("the config's {one:?} and {two:?} both name token ids for {module}"));
                    }
                }
            }
            None => return refuse("the config has no trainable_token_indices".to_owned()),
        };
        if ids.len() != tensor.shape[0] {
            return refuse(format!("has {} rows, but the config names {} token ids", tensor.shape[0], ids.len()));
        }
        let mut seen = HashSet::new();
        if let Some(id) = ids.iter().find(|id| !seen.insert(**id)) {
            return refuse(format!("the config names token id {id} twice"));
        }
        Ok(ids.clone())
    }

    /// What the adapter says of each table, at the places in the base that `paths` give.
    pub(super) fn raw_tokens(
        &self,
        tables: &BTreeMap<&str, Parts<'_>>,
        paths: &HashMap<&str, String>,
        pairs: &[HostPair],
    ) -> Loaded<Vec<RawTokens>> {
        let head_has_rows = tables.iter().any(|(module, parts)| is_head(module) && parts.rows.is_some());
        let mut raw = Vec::with_capacity(tables.len());
        for (module, parts) in tables {
            let path = &paths[module];
            if let Some(tensor) = parts.any()
                && let Some(pair) = pairs.iter().find(|pair| *pair.site.path == **path)
            {
                return Err(lora_and_rows(&self.at(tensor), &pair.site.path));
            }
            let trainable = parts.rows.map_or(Ok(Vec::new()), |tensor| self.trained(path, tensor))?;
            raw.push(RawTokens {
                site: self.table_site(path),
                table: parts.table.map(|tensor| self.matrix(tensor)).transpose()?,
                tied: parts.rows.is_some() && !head_has_rows,
                trainable,
                rows: parts.rows.map(|tensor| self.matrix(tensor)).transpose()?,
            });
        }
        Ok(raw)
    }

    fn table_site(&self, path: &str) -> SiteId {
        let base = self.base;
        let embedding = base.and_then(|base| base.embedding(path)).map(|embedding| embedding.site.clone());
        let head = || base.and_then(|base| base.linear(path)).map(|linear| linear.site.clone());
        embedding.or_else(head).unwrap_or_else(|| SiteId::from_path(path))
    }

    /// Compares the tables with the base's, where its files are there; what remains raw waits for the served tables.
    pub(super) fn compare(&mut self, adapter: Adapter) -> Loaded<Adapter> {
        let Some(base) = self.base else { return Ok(self.note_raw(adapter)) };
        let known = |raw: &RawTokens| {
            base.table(&raw.site.path).is_some() && (raw.table.is_none() || base.dtype(&raw.site.path).is_some())
        };
        if !adapter.raw_tokens.iter().all(known) {
            return Ok(self.note_raw(adapter));
        }
        let name = self.source.name.clone();
        let adapter = adapter.with_tables(base).map_err(|error| match error {
            crate::Error::Reject(mut reject) => {
                reject.message = format!("{name}: {}", reject.message);
                reject
            }
            other => Reject::new(Code::BaseFile, other.to_string()),
        })?;
        for tokens in &adapter.tokens {
            self.note("N_TOKEN_ROWS", replaced(tokens));
        }
        Ok(adapter)
    }

    fn note_raw(&mut self, adapter: Adapter) -> Adapter {
        for raw in &adapter.raw_tokens {
            let message = format!(
                "rows of {} are replaced; which ones, and whether a head shares them, is known once they are compared with \
                 the served table, or the adapter is loaded with the weights of its base",
                raw.site.path
            );
            self.note("N_TOKEN_ROWS_RAW", message);
        }
        adapter
    }
}

/// The refusal of LoRA and replaced rows in one place.
pub(crate) fn lora_and_rows(at: &str, path: &str) -> Box<Reject> {
    let message = format!(
        "{at}: {path} has replaced rows and LoRA too; which of them counts for a replaced row is not said, expected one"
    );
    Reject::new(Code::TrainableTokens, message)
}

/// `replaces 3 of 131 rows of lm_head: 0, 5, 130`
fn replaced(tokens: &HostTokens) -> String {
    const SHOWN: usize = 8;
    let ids: Vec<_> = tokens.ids.iter().take(SHOWN).map(u32::to_string).collect();
    let more = match tokens.ids.len().checked_sub(SHOWN) {
        None | Some(0) => String::new(),
        Some(more) => format!(" and {more} more"),
    };
    let (count, of) = (tokens.ids.len(), tokens.vocabulary);
    format!("replaces {count} of {of} rows of {}: {}{more}", tokens.site.path, ids.join(", "))
}
