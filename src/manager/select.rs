//! Which slot gives way to a new adapter.

use super::SlotView;

/// Why no slot can give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VictimError {
    /// All slots are in use.
    #[error("every cache slot is in use")]
    PoolFull,
}

/// The slot to fill next: the first vacant idle one, else the idle one that was used longest ago.
///
/// # Errors
/// [`VictimError::PoolFull`] when every slot is in use.
pub fn select_victim_slot(views: &[(usize, SlotView)]) -> Result<usize, VictimError> {
    let idle = || views.iter().filter(|(_, view)| view.ref_count == 0);
    let vacant = idle().find(|(_, view)| !view.filled);
    let victim = vacant.or_else(|| idle().min_by_key(|(_, view)| view.last_used));
    victim.map(|(slot, _)| *slot).ok_or(VictimError::PoolFull)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn view(filled: bool, ref_count: usize, last_used: u64) -> SlotView {
        SlotView { filled, ref_count, last_used }
    }

    #[test]
    fn a_vacant_slot_comes_before_any_adapter() {
        let views = [(2, view(true, 0, 1)), (3, view(false, 0, 9))];
        assert_eq!(select_victim_slot(&views), Ok(3));
    }

    #[test]
    fn the_idle_adapter_used_longest_ago_gives_way_and_a_busy_one_never() {
        let views = [(0, view(true, 1, 1)), (1, view(true, 0, 7)), (2, view(true, 0, 5)), (3, view(false, 1, 0))];
        assert_eq!(select_victim_slot(&views), Ok(2));
    }

    #[test]
    fn a_pool_in_full_use_has_no_victim() {
        assert_eq!(select_victim_slot(&[(0, view(true, 1, 1))]), Err(VictimError::PoolFull));
        assert_eq!(select_victim_slot(&[]), Err(VictimError::PoolFull));
    }
}
