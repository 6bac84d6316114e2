//! libFuzzer's bytes choose the damage that `tests/loader_fuzz.rs` lets a generator of random numbers choose.
#![no_main]

#[path = "../loader_support/mod.rs"]
mod loader_support;
#[path = "../loader_support/damage.rs"]
mod damage;
#[path = "../loader_support/mutate.rs"]
mod mutate;

use std::cell::RefCell;
use std::convert::Infallible;

use libfuzzer_sys::fuzz_target;
use loader_support::{Files, base, file_bytes, fixture_files, gguf};
use mutate::Bed;
use rand::TryRng;

/// Bytes as a source of choices: zeros when they are used up.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let (taken, left) = self.0.split_at(self.0.len().min(N));
        bytes[..taken.len()].copy_from_slice(taken);
        self.0 = left;
        bytes
    }
}

impl TryRng for Choices<'_> {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        // The high bits decide in `random_range`.
        Ok(u32::from_be_bytes(self.take()))
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        Ok(u64::from_be_bytes(self.take()))
    }

    fn try_fill_bytes(&mut self, out: &mut [u8]) -> Result<(), Infallible> {
        out.iter_mut().for_each(|byte| *byte = self.take::<1>()[0]);
        Ok(())
    }
}

thread_local! {
    static BED: RefCell<Bed> = RefCell::new(Bed::new());
}

fuzz_target!(|data: &[u8]| BED.with(|bed| _ = bed.borrow_mut().try_one(&mut Choices(data))));
