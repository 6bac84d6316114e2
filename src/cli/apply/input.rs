//! The input file: `SITE|x`, `SITE|y_base` and `slots`, checked as a whole, read a few rows at a time.

use std::cell::RefCell;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use lorapool::adapter::{TensorFile, TensorInfo};
use lorapool::pool::SiteSpec;
use lorapool::{DType, Error};

use super::super::failure::Failure;
use super::values;

/// Name of the tensor with each row's adapter.
const SLOTS: &str = "slots";
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
    /// Its index among the sites that were asked about.
    pub site: usize,
    /// Dimensions before the last one.
    pub lead: Vec<usize>,
    /// Their product.
    pub rows: usize,
    /// `x[rows][in_features]`
    pub x: TensorInfo,
    /// `y_base[rows][out_features]`
    pub y_base: TensorInfo,
}

impl Input {
    /// Opens a safetensors file and checks its header.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let header = TensorFile::read(path).map_err(Error::from)?;
        let file = File::open(path).map_err(|error| Failure::io(path.display(), error))?;
        Ok(Self { path: path.to_owned(), file: RefCell::new(file), header })
    }

    /// The sites that the file has an x for, in the order of `sites`, shapes checked; and the names of the
    /// tensors that are passed over.
    pub fn jobs(&self, sites: &[SiteSpec]) -> Result<(Vec<Job>, Vec<String>), Failure> {
        let mut jobs = Vec::new();
        let mut passed_over = Vec::new();
        for tensor in &self.header.tensors {
            match tensor.name.rsplit_once('|') {
                Some((path, "x")) => jobs.push(self.job(path, tensor, sites)?),
                Some((path, "y_base")) if self.find(&format!("{path}|x")).is_some() => {}
                None if &*tensor.name == SLOTS => {}
                _ => passed_over.push(tensor.name.to_string()),
            }
        }
        if jobs.is_empty() {
            return Err(self.fault("there is no tensor SITE|x, such as model.layers.0.self_attn.q_proj|x"));
        }
        jobs.sort_by_key(|job| job.site);
        Ok((jobs, passed_over))
    }

    fn job(&self, path: &str, x: &TensorInfo, sites: &[SiteSpec]) -> Result<Job, Failure> {
        let Some(site) = sites.iter().position(|site| &*site.id.path == path) else {
            return Err(self.fault(format!("tensor {:?}: there is no site {path:?}{}", x.name, nearest(path, sites))));
        };
        let name = format!("{path}|y_base");
        let Some(y_base) = self.find(&name) else {
            return Err(self.fault(format!("tensor {:?} has no {name:?} beside it", x.name)));
        };
        let spec = &sites[site];
        let lead = self.lead(x, spec.in_features)?;
        if self.lead(y_base, spec.out_features)? != lead {
            let found = format!("shape {:?}", y_base.shape);
            let expected = format!("{lead:?} and {} for x of {:?}", spec.out_features, x.shape);
            return Err(Error::shape(self.about(y_base), found, expected).into());
        }
        let rows = lead.iter().product();
        if u32::try_from(rows).is_err() {
            return Err(self.fault(format!("tensor {:?} has {rows} rows, the limit is {}", x.name, u32::MAX)));
        }
        Ok(Job { path: path.to_owned(), site, lead: lead.to_vec(), rows, x: x.clone(), y_base: y_base.clone() })
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
