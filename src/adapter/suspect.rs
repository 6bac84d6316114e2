//! What is no fault of an adapter's files but looks like one of its training or of the choice of file.

use rayon::prelude::*;

use super::audit::AuditSite;
use super::reading::listed;
use super::weights::{Adapter, HostMatrix, HostPair, Notice, RowVectors};
use crate::dtype::DType;

/// Root mean square of a delta's elements from which on it can't be a small change: the weights of trained linears
/// have a tenth of it or less.
const HUGE: f64 = 1.0;

/// Remarks on weights that load and yet look wrong. `sites` are the pairs' own, in their order.
pub(super) fn suspicions(adapter: &Adapter, sites: &[AuditSite]) -> Vec<Notice> {
    let found: Vec<_> = adapter.pairs.par_iter().zip(sites).map(|(pair, site)| Suspect::of(pair, site)).collect();
    let named = |what: fn(&Suspect) -> bool| -> Vec<&str> {
        adapter.pairs.iter().zip(&found).filter(|(_, s)| what(s)).map(|(pair, _)| &*pair.site.path).collect()
    };
    let mut notices = Vec::new();
    let mut note = |code: &'static str, sites: &[&str], what: &str| {
        if !sites.is_empty() {
            let message = format!("{what} at {} of {} sites: {}", sites.len(), adapter.pairs.len(), listed(sites));
            notices.push(Notice { code, message });
        }
    };
    note("N_B_ZERO", &named(|s| s.zero), "lora_B is all zero, as before training, so nothing changes,");
    note(
        "N_NORM_HUGE",
        &named(|s| s.huge),
        "the delta is as large as a whole weight or larger (norm / sqrt(in * out) > 1)",
    );
    note(
        "N_F16_OVERFLOW",
        &named(|s| s.overflow),
        "a weight is beyond the range of f16, so a pool of f16 would refuse it,",
    );
    notices
}

/// What was seen of one pair.
struct Suspect {
    zero: bool,
    huge: bool,
    overflow: bool,
}

impl Suspect {
    fn of(pair: &HostPair, site: &AuditSite) -> Self {
        let elements = (site.in_features * site.out_features) as f64;
        Self {
            zero: is_zero(&pair.b) && pair.vectors.as_ref().is_none_or(RowVectors::is_neutral),
            huge: site.norm > HUGE * elements.sqrt(),
            overflow: [&pair.a, &pair.b].iter().any(|matrix| matrix.to(DType::F16).is_err()),
        }
    }
}

/// Whether every element is 0 or -0.
fn is_zero(matrix: &HostMatrix) -> bool {
    let size = matrix.dtype.size() as usize;
    matrix.bytes.chunks_exact(size).all(|element| {
        element.split_last().is_none_or(|(sign, rest)| sign & 0x7f == 0 && rest.iter().all(|byte| *byte == 0))
    })
}
