//! The input file: `SITE|x` or `SITE|ids`, `SITE|y_base` and `slots`, checked as a whole, read a few rows at a time.

use std::cell::RefCell;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use lorapool::adapter::{TensorFile, TensorInfo};
use lorapool::pool::{ExpertSite, SiteKind, SiteSpec};
use lorapool::{DType, Error};

use super::super::failure::Failure;
use super::values;

/// Name of the tensor with each row's adapter.
const SLOTS: &str = "slots";
/// Name, behind a routed site's, of the tensor with each row's expert.
const EXPERTS: &str = "experts";
/// Elements read at a time.
const CHUNK: usize = 1 << 16;

/// An input file.
#[derive(Debug)]
pub struct Input {
    path: PathBuf,
    file: RefCell<File>,
    header: TensorFile,
}

/// A site that the file asks for.
#[derive(Debug)]
pub struct Job {
    /// The base's module path.
    pub path: String,
    /// Its index among the sites that were asked about: the one for LoRA, and the one for token rows.
    pub sites: [Option<usize>; 2],
    /// Dimensions before the last one.
    pub lead: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// Whether `x` holds tokens' numbers, `ids[rows]`.
    pub ids: bool,
    /// `x[rows][depth]`
    pub x: TensorInfo,
    /// Elements of a row of x; 1 of ids.
    pub depth: u32,
    /// Elements of a row of y.
    pub width: u32,
    /// Rows of the table that ids pick from.
    pub vocabulary: u32,
    /// `y_base[rows][width]`
    pub y_base: TensorInfo,
    /// Of a routed site, which then is none of the others: its index among those, and `experts[rows]`.
    pub experts: Option<(usize, TensorInfo)>,
}

impl Input {
    /// Opens a safetensors file and checks its header.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let header = TensorFile::read(path).map_err(Error::from)?;
        let file = File::open(path).map_err(|error| Failure::io(path.display(), error))?;
        Ok(Self { path: path.to_owned(), file: RefCell::new(file), header })
    }

    /// The sites that the file has an x or ids for, in the order of `sites`, shapes checked; and the names of the
    /// tensors that are passed over.
    pub fn jobs(&self, sites: &[SiteSpec], routed: &[ExpertSite]) -> Result<(Vec<Job>, Vec<String>), Failure> {
        let mut jobs = Vec::new();
        let mut passed_over = Vec::new();
        for tensor in &self.header.tensors {
            match tensor.name.rsplit_once('|') {
                Some((path, "x")) => jobs.push(self.job(path, tensor, false, (sites, routed))?),
                Some((path, "ids")) if self.find(&format!("{path}|y_base")).is_some() => {
                    jobs.push(self.job(path, tensor, true, (sites, routed))?);
                }
                Some((path, EXPERTS)) if self.find(&format!("{path}|x")).is_some() => {}
                Some((path, "y_base"))
                    if ["x", "ids"].iter().any(|part| self.find(&format!("{path}|{part}")).is_some()) => {}
                None if &*tensor.name == SLOTS => {}
                _ => passed_over.push(tensor.name.to_string()),
            }
        }
        if jobs.is_empty() {
            return Err(self.fault("there is no tensor SITE|x, such as model.layers.0.self_attn.q_proj|x"));
        }
        jobs.sort_by_key(|job| {
            let routed = job.experts.as_ref().map(|(site, _)| *site);
            (routed, job.sites.into_iter().flatten().min())
        });
        if let Some([one, _]) = jobs.array_windows().find(|[one, two]| one.path == two.path) {
            return Err(self.fault(format!("both {0}|x and {0}|ids are there, expected one", one.path)));
        }
        Ok((jobs, passed_over))
    }

    fn job(
        &self,
        path: &str,
        x: &TensorInfo,
        ids: bool,
        (sites, routed): (&[SiteSpec], &[ExpertSite]),
    ) -> Result<Job, Failure> {
        let at = |rows: bool| sites.iter().position(|s| &*s.id.path == path && s.is_token_rows() == rows);
        let found = [at(false), at(true)];
        if let (None, None, Some(site)) =
            (found[0], found[1], routed.iter().position(|site| !ids && &*site.id.path == path))
        {
            return self.job_of_experts(path, x, (site, &routed[site]));
        }
        let Some(site) = found[0].or(found[1]) else {
            return Err(self.fault(format!("tensor {:?}: there is no site {path:?}{}", x.name, nearest(path, sites))));
        };
        let embedding = |spec: &SiteSpec| spec.kind == SiteKind::Embedding;
        let spec = &sites[site];
        if !spec.is_token_rows() && embedding(spec) != ids {
            let (is, other) = if ids { ("a linear", "x") } else { ("an embedding", "ids") };
            return Err(self.fault(format!("tensor {:?}: {path} is {is}, expected {path}|{other}", x.name)));
        }
        // Of replaced rows alone: their width and number are those of the table.
        let (depth, width, vocabulary) = match (spec.is_token_rows(), ids) {
            (true, true) => (1, spec.in_features, spec.out_features),
            (true, false) => (spec.in_features, spec.out_features, spec.out_features),
            (false, true) => (1, spec.out_features, spec.in_features),
            (false, false) => (spec.in_features, spec.out_features, spec.out_features),
        };
        let name = format!("{path}|y_base");
        let Some(y_base) = self.find(&name) else {
            return Err(self.fault(format!("tensor {:?} has no {name:?} beside it", x.name)));
        };
        let lead = match ids {
            true if values::integer(x.dtype).is_none() => {
                return Err(Error::shape(self.about(x), format!("type {:?}", x.dtype), "integers").into());
            }
            true => &x.shape,
            false => self.lead(x, depth)?,
        };
        if self.lead(y_base, width)? != lead {
            let found = format!("shape {:?}", y_base.shape);
            let expected = format!("{lead:?} and {width} for {:?} of {:?}", x.name, x.shape);
            return Err(Error::shape(self.about(y_base), found, expected).into());
        }
        let rows = lead.iter().product();
        if u32::try_from(rows).is_err() {
            return Err(self.fault(format!("tensor {:?} has {rows} rows, the limit is {}", x.name, u32::MAX)));
        }
        let (path, lead, x, y_base) = (path.to_owned(), lead.to_vec(), x.clone(), y_base.clone());
        Ok(Job { path, sites: found, lead, rows, ids, x, depth, width, vocabulary, y_base, experts: None })
    }

    fn job_of_experts(&self, path: &str, x: &TensorInfo, (site, spec): (usize, &ExpertSite)) -> Result<Job, Failure> {
        let beside = |part: &str, what: &str| {
            let name = format!("{path}|{part}");
            let missing = || self.fault(format!("tensor {:?} has no {name:?} beside it{what}", x.name));
            self.find(&name).ok_or_else(missing)
        };
        let (y_base, experts) = (beside("y_base", "")?, beside(EXPERTS, ": the expert of each row")?);
        let lead = self.lead(x, spec.in_features)?;
        if self.lead(y_base, spec.out_features)? != lead {
            let found = format!("shape {:?}", y_base.shape);
            let expected = format!("{lead:?} and {} for {:?} of {:?}", spec.out_features, x.name, x.shape);
            return Err(Error::shape(self.about(y_base), found, expected).into());
        }
        let rows: usize = lead.iter().product();
        if u32::try_from(rows).is_err() {
            return Err(self.fault(format!("tensor {:?} has {rows} rows, the limit is {}", x.name, u32::MAX)));
        }
        if experts.shape.iter().product::<usize>() != rows {
            let expected = format!("{lead:?}, as {:?} of {:?}", x.name, x.shape);
            return Err(Error::shape(self.about(experts), format!("shape {:?}", experts.shape), expected).into());
        }
        Ok(Job {
            path: path.to_owned(),
            sites: [None, None],
            lead: lead.to_vec(),
            rows,
            ids: false,
            x: x.clone(),
            depth: spec.in_features,
            width: spec.out_features,
            vocabulary: 0,
            y_base: y_base.clone(),
            experts: Some((site, experts.clone())),
        })
    }

    /// Each row's expert, -1 for none.
    pub fn experts(&self, tensor: &TensorInfo, rows: Range<usize>, count: u32) -> Result<Vec<u32>, Failure> {
        let Some(read) = values::integer(tensor.dtype) else {
            return Err(Error::shape(self.about(tensor), format!("type {:?}", tensor.dtype), "i32 or i64").into());
        };
        let mut experts = Vec::with_capacity(rows.len());
        self.read(tensor, rows, |row, bytes| {
            match read(bytes) {
                -1 => experts.push(u32::MAX),
                expert if (0..i64::from(count)).contains(&expert) => experts.push(expert as u32),
                expert => {
                    let what = format!("{}: row {row}", self.about(tensor));
                    let expected = format!("one of {count} experts, or -1 for none");
                    return Err(Error::shape(what, expert, expected).into());
                }
            }
            Ok(())
        })?;
        Ok(experts)
    }

    /// The dimensions before the last, which must be `width`.
    fn lead<'a>(&self, tensor: &'a TensorInfo, width: u32) -> Result<&'a [usize], Failure> {
        if values::float(tensor.dtype).is_none() {
            return Err(Error::shape(self.about(tensor), format!("type {:?}", tensor.dtype), "a float type").into());
        }
        match tensor.shape.split_last() {
            Some((last, lead)) if *last == width as usize => Ok(lead),
            _ => {
                let found = format!("shape {:?}", tensor.shape);
                Err(Error::shape(self.about(tensor), found, format!("[.., {width}]")).into())
            }
        }
    }

    /// Each row's adapter: an index into `0..adapters`, -1 or -2 for none. `None` when the file doesn't say.
    pub fn slots(&self, adapters: usize) -> Result<Option<Vec<i32>>, Failure> {
        let Some(tensor) = self.find(SLOTS) else { return Ok(None) };
        let Some(read) = values::integer(tensor.dtype) else {
            return Err(Error::shape(self.about(tensor), format!("type {:?}", tensor.dtype), "i32 or i64").into());
        };
        let count = tensor.shape.iter().product();
        let mut slots = Vec::new();
        self.read(tensor, 0..count, |row, bytes| {
            let slot = read(bytes);
            match i32::try_from(slot) {
                Ok(small) if small >= -2 && i64::from(small) < adapters as i64 => slots.push(small),
                _ => {
                    let what = format!("{}: row {row}", self.about(tensor));
                    let expected = format!("-1 for the base, or the index of one of {adapters} adapters");
                    return Err(Error::shape(what, slot, expected).into());
                }
            }
            Ok(())
        })?;
        Ok(Some(slots))
    }

    /// Checks that a site has as many rows as there are slots.
    pub fn check_rows(&self, job: &Job, slots: &[i32]) -> Result<(), Failure> {
        if job.rows == slots.len() {
            return Ok(());
        }
        let found = format!("{} rows", job.rows);
        Err(Error::shape(self.about(&job.x), found, format!("{}, as {SLOTS:?} has", slots.len())).into())
    }

    /// Tokens' numbers of some rows, as u32.
    pub fn ids(&self, job: &Job, rows: Range<usize>) -> Result<Vec<u8>, Failure> {
        let Some(read) = values::integer(job.x.dtype) else { return Ok(Vec::new()) };
        let mut out = Vec::with_capacity(rows.len() * 4);
        self.read(&job.x, rows, |row, bytes| {
            let id = read(bytes);
            match u32::try_from(id) {
                Ok(small) if small < job.vocabulary => out.extend_from_slice(&small.to_le_bytes()),
                _ => {
                    let what = format!("{}: row {row}", self.about(&job.x));
                    return Err(Error::shape(what, id, format!("a token below {}", job.vocabulary)).into());
                }
            }
            Ok(())
        })?;
        Ok(out)
    }

    /// Rows of a matrix of `width` columns as `dtype`.
    pub fn rows(
        &self,
        tensor: &TensorInfo,
        rows: Range<usize>,
        width: usize,
        dtype: DType,
    ) -> Result<Vec<u8>, Failure> {
        let Some(read) = values::float(tensor.dtype) else { return Ok(Vec::new()) };
        let elements = rows.start * width..rows.end * width;
        let mut out = Vec::with_capacity(elements.len() * dtype.size() as usize);
        self.read(tensor, elements, |index, bytes| {
            let value = read(bytes);
            if values::push(value, dtype, &mut out) {
                return Ok(());
            }
            let tensor = self.about(tensor);
            Err(Error::Overflow { tensor, index, value: value as f32, dtype }.into())
        })?;
        Ok(out)
    }

    /// Gives each of a range of a tensor's elements to `each`, with its index.
    fn read(
        &self,
        tensor: &TensorInfo,
        elements: Range<usize>,
        mut each: impl FnMut(usize, &[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let size = tensor.dtype.bitsize() / 8;
        let fail = |error| Failure::io(self.path.display(), error);
        let mut file = self.file.borrow_mut();
        file.seek(SeekFrom::Start(tensor.start + (elements.start * size) as u64)).map_err(fail)?;
        let mut bytes = vec![0; elements.len().min(CHUNK) * size];
        let mut at = elements.start;
        while at < elements.end {
            let count = (elements.end - at).min(CHUNK);
            let bytes = &mut bytes[..count * size];
            file.read_exact(bytes).map_err(fail)?;
            for (i, element) in bytes.chunks_exact(size).enumerate() {
                each(at + i, element)?;
            }
            at += count;
        }
        Ok(())
    }

    fn find(&self, name: &str) -> Option<&TensorInfo> {
        self.header.tensors.iter().find(|tensor| &*tensor.name == name)
    }

    fn about(&self, tensor: &TensorInfo) -> String {
        format!("{}: tensor {:?}", self.path.display(), tensor.name)
    }

    fn fault(&self, message: impl std::fmt::Display) -> Failure {
        Error::Input(format!("{}: {message}", self.path.display())).into()
    }
}

/// `; the nearest is ...`: the site whose path has most segments in common with `path`, if any.
fn nearest(path: &str, sites: &[SiteSpec]) -> String {
    let common = |site: &&SiteSpec| {
        let from_end = path.rsplit('.').zip(site.id.path.rsplit('.')).take_while(|(a, b)| a == b).count();
        let from_start = path.split('.').zip(site.id.path.split('.')).take_while(|(a, b)| a == b).count();
        from_end + from_start
    };
    // The first of the best.
    match sites.iter().rev().max_by_key(common) {
        Some(site) if common(&site) > 0 => format!("; the nearest of {} is {:?}", sites.len(), site.id.path),
        _ => String::new(),
    }
}
