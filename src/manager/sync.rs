//! Locks, as the manager uses them: never poisoned, waits with a deadline. Under `--cfg shuttle` they are
//! shuttle's, which runs the same code through many interleavings.

use std::sync::PoisonError;
use std::time::Instant;

#[cfg(shuttle)]
pub(super) use shuttle::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
#[cfg(not(shuttle))]
pub(super) use std::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

// A panic while a lock is held can't leave these states half changed: every change is made by one call
// that checks before it writes. So a poisoned lock is taken as it is.

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification.
pub(super) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification; gives the guard back as an error once `deadline` has passed.
pub(super) fn wait_until<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Instant,
) -> Result<MutexGuard<'a, T>, MutexGuard<'a, T>> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(guard);
    }
    Ok(condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0)
}
