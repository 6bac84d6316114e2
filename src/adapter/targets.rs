//! What a config says is adapted, checked against the tensors, which decide. Never a reason to refuse.

use std::collections::BTreeMap;

use super::config::Targets;
use super::pattern::{Pattern, names};
use super::reading::{Reading, listed};
use super::site::{LoraModule, SiteId};
use super::weights::HostPair;

impl Reading<'_> {
    /// Without a base, a module whose widths change from layer to layer is all that can be seen of tensors from
    /// another model. Some models are built so.
    pub(super) fn check_widths(&mut self, pairs: &[HostPair]) {
        if self.base.is_some() {
            return;
        }
        let mut first: BTreeMap<&LoraModule, &HostPair> = BTreeMap::new();
        let mut odd = None;
        for pair in pairs {
            let before = *first.entry(&pair.site.module).or_insert(pair);
            if (before.in_features(), before.out_features()) != (pair.in_features(), pair.out_features()) {
                odd = odd.or(Some((before, pair)));
            }
        }
        if let Some((before, pair)) = odd {
            let message = format!(
                "widths change between layers: {} has {} inputs and {} outputs, {} has {} and {}; give the base to check them",
                before.site.path,
                before.in_features(),
                before.out_features(),
                pair.site.path,
                pair.in_features(),
                pair.out_features()
            );
            self.note("N_WIDTHS_VARY", message);
        }
    }

    /// `target_modules`, `layers_to_transform`: what they say and the tensors don't, and the reverse.
    pub(super) fn check_targets<'m>(&mut self, modules: impl Iterator<Item = &'m str>) {
        let modules: Vec<_> = modules.collect();
        let outside = match &self.config.target_modules {
            Targets::None => Vec::new(),
            Targets::Pattern(all) if all.eq_ignore_ascii_case("all-linear") => Vec::new(),
            Targets::Pattern(expression) => match Pattern::full(expression) {
                Ok(pattern) => modules.iter().filter(|module| pattern.matches(module) == Ok(false)).copied().collect(),
                Err(error) => {
                    self.note("N_TARGETS_PATTERN", format!("target_modules is not checked: {error}"));
                    Vec::new()
                }
            },
            Targets::Names(entries) => {
                let idle: Vec<_> = entries
                    .iter()
                    .filter(|entry| !modules.iter().any(|module| names(entry, module)))
                    .map(String::as_str)
                    .collect();
                if !idle.is_empty() {
                    self.note("N_TARGETS_IDLE", format!("target_modules without tensors: {}", listed(&idle)));
                }
                modules.iter().filter(|module| !entries.iter().any(|entry| names(entry, module))).copied().collect()
            }
        };
        if !outside.is_empty() {
            self.note(
                "N_TARGETS_OUTSIDE",
                format!("applied although target_modules does not name them: {}", listed(&outside)),
            );
        }
        if let Some(layers) = &self.config.layers_to_transform {
            let outside = modules.iter().filter(|module| !layers.contains(&SiteId::from_path(module).layer));
            let outside: Vec<_> = outside.copied().collect();
            if !outside.is_empty() {
                let message =
                    format!("applied although layers_to_transform does not name their layer: {}", listed(&outside));
                self.note("N_LAYERS_OUTSIDE", message);
            }
        }
    }
}
