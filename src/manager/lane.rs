//! A fair lock with a time limit: who came first goes first, and who gives up leaves nothing behind.

use std::collections::VecDeque;
use std::time::Instant;

use super::sync::{Condvar, Mutex, lock, wait_until};

/// A queue for one.
#[derive(Debug, Default)]
pub(super) struct Lane {
    queue: Mutex<Queue>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    next: u64,
    /// Tickets; the first one is inside.
    waiting: VecDeque<u64>,
}

/// Being inside the lane, until dropped.
#[derive(Debug)]
pub(super) struct Inside<'a> {
    lane: &'a Lane,
    ticket: u64,
}

impl Lane {
    /// Waits for its turn until `deadline`; `None` when that passes first.
    pub fn enter(&self, deadline: Instant) -> Option<Inside<'_>> {
        let mut queue = lock(&self.queue);
        let ticket = queue.next;
        queue.next += 1;
        queue.waiting.push_back(ticket);
        let inside = Inside { lane: self, ticket };
        while queue.waiting.front() != Some(&ticket) {
            match wait_until(&self.moved, queue, deadline) {
                Ok(woken) => queue = woken,
                Err(late) => {
                    drop(late);
                    drop(inside); // leaves the queue
                    return None;
                }
            }
        }
        Some(inside)
    }

    /// How many are inside or wait.
    pub fn len(&self) -> usize {
        lock(&self.queue).waiting.len()
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.lane.queue);
        queue.waiting.retain(|ticket| *ticket != self.ticket);
        self.lane.moved.notify_all();
    }
}
