//! Slot images in host memory, ready to be sent: what was evicted from its slot comes back without a look at
//! its tensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use super::Source;
use super::sync::{Mutex, lock};
use crate::adapter::Adapter;
use crate::backend::{GpuBackend, HostBuffer};
use crate::error::Result;
use crate::pool::{Pool, SlotImage};

/// Folders that are looked at below an adapter's directory: PEFT saves named adapters one level down.
const DEPTH: usize = 2;

/// An adapter as it goes to a slot.
#[derive(Debug)]
pub(super) struct Ready {
    /// What it is; of one from disk without its weights, which are in the image.
    pub adapter: Arc<Adapter>,
    pub image: SlotImage,
}

/// What tells that a source still has the bytes that it had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stamp {
    /// Host memory, by its digest.
    Memory([u8; 32]),
    /// Files, by path, length and time of the last change, and the bits of the weights that they are merged with.
    Files(Vec<(PathBuf, u64, Option<SystemTime>)>, Vec<u32>),
}

impl Stamp {
    /// Looks at every file of a source.
    fn of(source: &Source) -> Self {
        match source {
            Source::Memory(adapter) => Self::Memory(adapter.digest),
            Source::Dir(dir) => Self::files([dir], Vec::new()),
            Source::Merged(parts) => Self::files(
                parts.iter().map(|(dir, _)| dir),
                parts.iter().map(|(_, weight)| weight.to_bits()).collect(),
            ),
        }
    }

    fn files<'a>(dirs: impl IntoIterator<Item = &'a PathBuf>, weights: Vec<u32>) -> Self {
        let mut files = Vec::new();
        for dir in dirs {
            let first = files.len();
            list(dir, DEPTH, &mut files);
            files[first..].sort();
        }
        Self::Files(files, weights)
    }
}

/// Regular files at and below `path`. What can't be read is left to the load to complain of.
fn list(path: &Path, depth: usize, files: &mut Vec<(PathBuf, u64, Option<SystemTime>)>) {
    let Ok(meta) = std::fs::metadata(path) else { return };
    if meta.is_file() {
        files.push((path.to_owned(), meta.len(), meta.modified().ok()));
    } else if depth > 0
        && let Ok(entries) = std::fs::read_dir(path)
    {
        entries.flatten().for_each(|entry| list(&entry.path(), depth - 1, files));
    }
}

/// Images of the adapters used last, in host memory that the device reads at the full speed of its link.
#[derive(Debug)]
pub(super) struct HostCache {
    limit: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    entries: BTreeMap<Arc<str>, Entry>,
    bytes: u64,
    tick: u64,
    /// Memory of images that were dropped, for the next ones: all are of one length.
    spare: Vec<HostBuffer>,
}

#[derive(Debug)]
struct Entry {
    ready: Arc<Ready>,
    stamp: Stamp,
    used: u64,
}

impl HostCache {
    /// A cache of at most `limit` bytes of images.
    pub fn new(limit: u64) -> Self {
        Self { limit, state: Mutex::default() }
    }

    /// What tells later whether `source` has changed since; `None` where no image of `pool` is kept, so that no one will
    /// ask and no file is looked at.
    pub fn stamp(&self, pool: &Pool, source: &Source) -> Option<Stamp> {
        let keeps = self.limit > 0 && SlotImage::len_in(pool) as u64 <= self.limit;
        keeps.then(|| Stamp::of(source))
    }

    /// The image of `name`, if its source has not changed since.
    pub fn get(&self, name: &str, stamp: &Stamp) -> Option<Arc<Ready>> {
        let mut state = lock(&self.state);
        state.tick += 1;
        let tick = state.tick;
        let entry = state.entries.get_mut(name).filter(|entry| entry.stamp == *stamp)?;
        entry.used = tick;
        Some(entry.ready.clone())
    }

    /// Packs `adapter`, in fast memory where the image is to be kept.
    ///
    /// # Errors
    /// As [`SlotImage::new`].
    pub fn pack(&self, gpu: &dyn GpuBackend, pool: &Pool, adapter: &Adapter) -> Result<SlotImage> {
        let len = SlotImage::len_in(pool);
        if len as u64 > self.limit {
            return SlotImage::new(pool, adapter);
        }
        let spare = lock(&self.state).spare.pop();
        let memory = spare.or_else(|| {
            let got = gpu.alloc_host(len);
            got.inspect_err(|error| tracing::warn!(%error, "no page-locked memory: an adapter will load slower")).ok()
        });
        match memory {
            Some(memory) => SlotImage::new_in(pool, adapter, memory),
            None => SlotImage::new(pool, adapter),
        }
    }

    /// Keeps an image under `name`, in place of an older one; those that were not used for longest make room.
    pub fn put(&self, name: &str, stamp: Stamp, ready: &Arc<Ready>) {
        let len = ready.image.host_bytes();
        if len > self.limit {
            return;
        }
        let mut state = lock(&self.state);
        state.remove(name);
        while state.bytes + len > self.limit {
            let oldest = state.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(name, _)| name.clone());
            let Some(oldest) = oldest else { break };
            state.remove(&oldest);
        }
        state.tick += 1;
        state.bytes += len;
        let entry = Entry { ready: ready.clone(), stamp, used: state.tick };
        state.entries.insert(name.into(), entry);
    }

    /// Forgets `name`.
    pub fn remove(&self, name: &str) {
        lock(&self.state).remove(name);
    }

    /// Forgets all.
    pub fn clear(&self) {
        let mut state = lock(&self.state);
        let names: Vec<_> = state.entries.keys().cloned().collect();
        names.iter().for_each(|name| state.remove(name));
    }

    /// Bytes of images.
    pub fn bytes(&self) -> u64 {
        lock(&self.state).bytes
    }
}

impl State {
    fn remove(&mut self, name: &str) {
        let Some(entry) = self.entries.remove(name) else { return };
        self.bytes -= entry.ready.image.host_bytes();
        // One is enough: images come one at a time.
        if let (Ok(ready), true) = (Arc::try_unwrap(entry.ready), self.spare.is_empty()) {
            self.spare.push(ready.image.into_memory());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::{HostMatrix, HostPair, SiteId};
    use crate::backend;
    use crate::dtype::DType;
    use crate::pool::PoolSpec;

    fn adapter(value: f32) -> Arc<Adapter> {
        let matrix = |rows, cols| HostMatrix {
            dtype: DType::F32,
            rows,
            cols,
            bytes: bytemuck::cast_slice(&vec![value; rows * cols]).to_vec(),
        };
        let site = SiteId::from_path("model.layers.0.self_attn.q_proj");
        Arc::new(Adapter::from_pairs(vec![HostPair::new(site, matrix(2, 8), matrix(8, 2), 1.0)]))
    }

    #[test]
    fn the_image_used_longest_ago_makes_room_and_a_changed_source_is_no_hit() {
        let gpu = backend::open("cpu", 0).unwrap();
        let first = adapter(1.0);
        let pool = Pool::new(&*gpu, PoolSpec::for_adapters([&*first], 1, DType::F32).unwrap()).unwrap();
        let len = SlotImage::len_in(&pool) as u64;
        let cache = HostCache::new(2 * len + 1);
        let stamp = |adapter: &Arc<Adapter>| Stamp::of(&Source::Memory(adapter.clone()));
        let put = |name: &str, adapter: &Arc<Adapter>| {
            let image = cache.pack(&*gpu, &pool, adapter).unwrap();
            cache.put(name, stamp(adapter), &Arc::new(Ready { adapter: adapter.clone(), image }));
        };
        let (second, third) = (adapter(2.0), adapter(3.0));
        put("first", &first);
        put("second", &second);
        assert!(cache.get("first", &stamp(&first)).is_some());
        put("third", &third);
        assert!(cache.get("second", &stamp(&second)).is_none(), "it was used longest ago");
        assert!(cache.get("first", &stamp(&third)).is_none(), "other bytes under its name");
        let kept = cache.get("third", &stamp(&third)).unwrap();
        assert_eq!(kept.image.bytes(), SlotImage::new(&pool, &third).unwrap().bytes(), "reused memory is clean");
        assert_eq!(cache.bytes(), 2 * len);
        cache.remove("first");
        assert_eq!(cache.bytes(), len);
    }

    #[test]
    fn an_image_larger_than_the_cache_is_not_kept() {
        let gpu = backend::open("cpu", 0).unwrap();
        let adapter = adapter(1.0);
        let pool = Pool::new(&*gpu, PoolSpec::for_adapters([&*adapter], 1, DType::F32).unwrap()).unwrap();
        let cache = HostCache::new(SlotImage::len_in(&pool) as u64 - 1);
        let image = cache.pack(&*gpu, &pool, &adapter).unwrap();
        let stamp = Stamp::of(&Source::Memory(adapter.clone()));
        cache.put("large", stamp.clone(), &Arc::new(Ready { adapter, image }));
        assert!(cache.get("large", &stamp).is_none());
        assert_eq!(cache.bytes(), 0);
    }

    #[test]
    fn a_source_is_looked_at_where_its_image_may_be_kept_and_nowhere_else() {
        let gpu = backend::open("cpu", 0).unwrap();
        let adapter = adapter(1.0);
        let pool = Pool::new(&*gpu, PoolSpec::for_adapters([&*adapter], 1, DType::F32).unwrap()).unwrap();
        let len = SlotImage::len_in(&pool) as u64;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("adapter_config.json"), "{}").unwrap();
        for source in [Source::Memory(adapter), Source::Dir(dir.path().to_owned())] {
            for limit in [0, 1, len - 1] {
                assert_eq!(HostCache::new(limit).stamp(&pool, &source), None, "{limit} bytes");
            }
            assert_eq!(HostCache::new(len).stamp(&pool, &source), Some(Stamp::of(&source)));
        }
    }
}
