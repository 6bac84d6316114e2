//! Where an adapter's tensors lie: one safetensors file, or the shards that an index names.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mmap_io::MemoryMappedFile;

use super::file;
use super::gguf::Rated;
use super::header::{Header, TensorInfo};
use super::json::{Json, Limits, excerpt};
use super::reject::{Code, Loaded, Reject};

/// The one file.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
/// What names the shards.
const INDEX: &str = "adapter_model.safetensors.index.json";
/// An index names every tensor of an adapter: a few MB at most.
const LIMITS: Limits = Limits { bytes: 64 << 20, values: 1 << 21 };
/// Most shards of an adapter.
const MAX_SHARDS: usize = 1024;

/// An adapter's tensors and the maps of the files that hold them.
#[derive(Debug, Default)]
pub(super) struct Source {
    /// The file, or the index of the files, for messages on all of them.
    pub name: String,
    /// Every tensor, file by file in the order of their names.
    pub tensors: Vec<TensorInfo>,
    pub(super) maps: HashMap<Arc<Path>, MemoryMappedFile>,
    /// Tensors by name whose bytes are not the file's, in a format that keeps them otherwise.
    pub(super) rewritten: HashMap<Box<str>, Vec<u8>>,
    /// Names as the file has them, where those of `tensors` are PEFT's for the same.
    pub(super) written: HashMap<Box<str>, Box<str>>,
    /// Rank and scale by module, in a format that has no config.
    pub rated: Option<Rated>,
}

impl Source {
    /// The tensors of the adapter in `dir`; none if there is no such file.
    pub fn open(dir: &Path) -> Loaded<Option<Self>> {
        let (single, index) = (dir.join(WEIGHTS), dir.join(INDEX));
        match (single.exists(), index.exists()) {
            (false, false) => Ok(None),
            (true, false) => Self::of(single.display().to_string(), Header::read(&single)?.tensors).map(Some),
            (single_too, true) => {
                let tensors = sharded(dir, &index, single_too)?;
                Self::of(index.display().to_string(), tensors).map(Some)
            }
        }
    }

    fn of(name: String, tensors: Vec<TensorInfo>) -> Loaded<Self> {
        let mut maps = HashMap::new();
        for tensor in &tensors {
            if !maps.contains_key(&tensor.file) {
                maps.insert(tensor.file.clone(), file::map(&tensor.file)?);
            }
        }
        Ok(Self { name, tensors, maps, ..Self::default() })
    }

    /// A tensor's name as its file has it.
    pub fn written<'s>(&'s self, tensor: &'s TensorInfo) -> &'s str {
        self.written.get(&tensor.name).unwrap_or(&tensor.name)
    }

    /// A tensor's bytes, in its file's map or as they were rewritten.
    pub fn bytes(&self, tensor: &TensorInfo) -> Loaded<&[u8]> {
        if let Some(bytes) = self.rewritten.get(&tensor.name) {
            return Ok(bytes);
        }
        match self.maps.get(&tensor.file) {
            Some(map) => bytes_of(map, tensor),
            None => Err(Reject::new(Code::NotFound, format!("{}: not open", tensor.file.display()))),
        }
    }
}

/// A tensor's bytes in the map of its file.
pub(super) fn bytes_of<'m>(map: &'m MemoryMappedFile, tensor: &TensorInfo) -> Loaded<&'m [u8]> {
    map.as_slice_bytes(tensor.start, tensor.end - tensor.start).map_err(|e| file::unreadable(&tensor.file, &e))
}

/// The tensors of all shards, where index and shards agree on every one of them.
fn sharded(dir: &Path, index: &Path, single_too: bool) -> Loaded<Vec<TensorInfo>> {
    let name = index.display();
    let (text, _) = file::read_text(index, LIMITS)?;
    let json = Json::parse(&name.to_string(), &text, LIMITS)?;
    let Some(Json::Object(map)) = json.get("weight_map") else {
        return Err(Reject::new(Code::ShardIndex, format!("{name}: expected an object weight_map")));
    };
    let mut shards: BTreeMap<&str, HashMap<&str, bool>> = BTreeMap::new();
    for (tensor, shard) in map {
        // A file beside the index and nowhere else.
        let plain = |s: &&str| !s.contains(['/', '\\', '\0']) && s.ends_with(".safetensors");
        let Some(shard) = shard.as_str().filter(plain) else {
            let message = format!(
                "{name}: tensor {:?} is in {shard}, expected the name of a safetensors file beside the index",
                excerpt(tensor)
            );
            return Err(Reject::new(Code::ShardIndex, message));
        };
        shards.entry(shard).or_default().insert(tensor, false);
    }
    if shards.len() > MAX_SHARDS {
        let message = format!("{name}: names {} shards, expected at most {MAX_SHARDS}", shards.len());
        return Err(Reject::new(Code::ShardIndex, message));
    }
    if single_too && !shards.contains_key(WEIGHTS) {
        let message = format!(
            "{name}: there is also {WEIGHTS}, which the index does not name; which of the two is the adapter is \
             ambiguous: remove one"
        );
        return Err(Reject::new(Code::ShardIndex, message));
    }
    let at = |shard: &str| -> PathBuf { dir.join(shard) };
    if let Some(missing) = shards.keys().find(|shard| !at(shard).exists()) {
        let message =
            format!("{}: not there, but {name} names it for {} tensors", at(missing).display(), shards[missing].len());
        return Err(Reject::new(Code::ShardMissing, message));
    }
    let mut tensors: Vec<TensorInfo> = Vec::new();
    let mut holders: HashMap<Box<str>, Arc<Path>> = HashMap::new();
    for (shard, expected) in &mut shards {
        for tensor in Header::read(&at(shard))?.tensors {
            if let Some(first) = holders.insert(tensor.name.clone(), tensor.file.clone()) {
                let message = format!(
                    "{}: tensor {:?} is in {} too, expected one place",
                    tensor.file.display(),
                    excerpt(&tensor.name),
                    first.display()
                );
                return Err(Reject::new(Code::FileDuplicate, message));
            }
            match expected.get_mut(&*tensor.name) {
                Some(found) => *found = true,
                None => {
                    let message = format!(
                        "{}: tensor {:?} is in the shard, but {name} does not say so",
                        tensor.file.display(),
                        excerpt(&tensor.name)
                    );
                    return Err(Reject::new(Code::ShardTensor, message));
                }
            }
            tensors.push(tensor);
        }
        if let Some(absent) = expected.iter().filter(|(_, found)| !**found).map(|(tensor, _)| *tensor).min() {
            let message = format!("{}: has no tensor {:?}, but {name} says so", at(shard).display(), excerpt(absent));
            return Err(Reject::new(Code::ShardTensor, message));
        }
    }
    Ok(tensors)
}
