//! Token overlays in two stages: kept raw while the served tables are not known, built once they are.

use std::ops::Range;
use std::sync::Arc;

use super::LoraWeights;
use super::layers::{add_tokens, cells_of};
use crate::adapter::{Adapter, HostTokens, RawTokens, ServedTable, ServedTables, SiteId, lora_and_rows};
use crate::backend::GpuBackend;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::memory::Region;
use crate::pool::{Part, write_tokens};

/// What a slot's adapter says of tables that no one has compared with the served ones yet, in the file's own types and
/// host memory. It stands in [`LoraWeights::overlay_raw`] until [`LoraWeights::set_served_tables`] builds the overlay.
#[derive(Clone, Debug)]
pub struct OverlayRawSlot {
    /// Table by table.
    pub tables: Vec<RawTokens>,
}

/// The embedding and head that a host serves, in device memory.
#[derive(Clone, Debug)]
pub struct DeviceTables {
    gpu: Arc<dyn GpuBackend>,
    tables: Vec<DeviceTable>,
    /// An embedding, and the head that shares its weight.
    tied: Option<(String, SiteId)>,
}

#[derive(Clone, Debug)]
struct DeviceTable {
    gpu: Arc<dyn GpuBackend>,
    path: String,
    region: Region,
    vocabulary: usize,
    width: usize,
    dtype: DType,
}

impl DeviceTables {
    /// None yet.
    pub fn new(gpu: &Arc<dyn GpuBackend>) -> Self {
        Self { gpu: gpu.clone(), tables: Vec::new(), tied: None }
    }

    /// With the table of the embedding or head at a module path: `[vocabulary][width]` without padding.
    ///
    /// # Errors
    /// [`Error::Shape`] when `region` is smaller.
    pub fn with(mut self, path: &str, region: Region, vocabulary: usize, width: usize, dtype: DType) -> Result<Self> {
        let bytes = vocabulary as u64 * width as u64 * dtype.size();
        if region.len() < bytes {
            let found = format!("{} bytes", region.len());
            return Err(Error::shape(
                format!("table {path}"),
                found,
                format!("{bytes} for {vocabulary} rows of {width}"),
            ));
        }
        let gpu = self.gpu.clone();
        self.tables.push(DeviceTable { gpu, path: path.to_owned(), region, vocabulary, width, dtype });
        Ok(self)
    }

    /// With a head that shares the weight of an embedding.
    pub fn tied(mut self, embedding: &str, head: &str) -> Self {
        self.tied = Some((embedding.to_owned(), SiteId::from_path(head)));
        self
    }
}

impl ServedTable for DeviceTable {
    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn width(&self) -> usize {
        self.width
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn read(&self, rows: Range<usize>) -> Result<Vec<u8>> {
        let row = self.width as u64 * self.dtype.size();
        self.gpu.read(&self.region.slice(rows.start as u64 * row, rows.len() as u64 * row)?)
    }

    fn name(&self) -> String {
        format!("the served {}", self.path)
    }
}

impl ServedTables for DeviceTables {
    fn table(&self, path: &str) -> Option<Box<dyn ServedTable + '_>> {
        let shared =
            self.tied.as_ref().filter(|(_, head)| *head.path == *path).map(|(embedding, _)| embedding.as_str());
        let of = |path: &str| self.tables.iter().find(|table| table.path == path);
        of(path).or_else(|| of(shared?)).map(|table| Box::new(table.clone()) as Box<dyn ServedTable>)
    }

    fn tied_head(&self, embedding: &str) -> Option<SiteId> {
        self.tied.as_ref().filter(|(of, _)| of == embedding).map(|(_, head)| head.clone())
    }
}

impl LoraWeights {
    /// Says what embedding and head are served, and builds the overlays that waited for it: the rows that differ from
    /// the served ones, and those that were trained, which count before the former. Raw tables are freed; each slot's
    /// tables change in one submission. Adapters that come later are compared with these tables as they come.
    ///
    /// # Errors
    /// Those of [`RawTokens::resolve`], [`Error::Limit`] for more rows than the pool has room for, or the backend's. As
    /// long as no slot has been written nothing has changed, and no slot is ever half written.
    pub fn set_served_tables(&mut self, tables: Arc<dyn ServedTables + Send + Sync>) -> Result<()> {
        let mut built: Vec<(usize, Vec<HostTokens>)> = Vec::new();
        for (slot, raw) in self.overlay_raw.iter().enumerate() {
            let Some(raw) = raw else { continue };
            let mut rows: Vec<HostTokens> = Vec::new();
            for table in &raw.tables {
                for tokens in table.resolve(&*tables)? {
                    self.check_alone(slot, &tokens)?;
                    self.storage.fit_tokens(&tokens)?;
                    rows.push(tokens);
                }
            }
            built.push((slot, rows));
        }
        for (slot, rows) in built {
            self.build_overlay(slot, &rows)?;
            self.overlay_raw[slot] = None;
        }
        self.served = Some(tables);
        Ok(())
    }

    /// Writes a slot's replaced rows beside what it has, and publishes them.
    fn build_overlay(&mut self, slot: usize, rows: &[HostTokens]) -> Result<()> {
        let pool = self.storage.clone();
        let mut layers = self.slots[slot].layers.clone();
        let mut parts = Vec::with_capacity(rows.len());
        for tokens in rows {
            let site = pool.fit_tokens(tokens)?;
            let mut bytes = vec![0; pool.layout().part_bytes(site, Part::A) as usize];
            write_tokens(&pool, site, tokens, &mut bytes)?;
            parts.push((pool.part(slot as u32, site, Part::A)?, bytes));
            add_tokens(&pool, slot as u32, tokens, &mut layers)?;
        }
        let cells = cells_of(&pool, &layers);
        let scale = pool.tables().slot_scale(slot as u32);
        pool.publish(&*self.gpu, slot as u32, &cells, scale, &mut |encoder| {
            parts.iter().try_for_each(|(region, bytes)| encoder.write(region, bytes))
        })?;
        self.slots[slot].layers = layers;
        Ok(())
    }

    /// Refuses replaced rows where the slot has LoRA, or rows already.
    fn check_alone(&self, slot: usize, tokens: &HostTokens) -> Result<()> {
        let layer = self.slots[slot].layers.get(tokens.site.layer).and_then(Option::as_ref);
        let taken = layer.is_some_and(|layer| {
            layer.pairs.contains_key(&tokens.site.module) || layer.tokens.contains_key(&tokens.site.module)
        });
        match taken {
            true => Err(lora_and_rows(&format!("adapter {:?}", self.slots[slot].name), &tokens.site.path).into()),
            false => Ok(()),
        }
    }

    /// `adapter` with its raw tables compared with the served ones, if they are known.
    pub(super) fn compared(&self, adapter: Adapter) -> Result<Adapter> {
        match &self.served {
            Some(served) if !adapter.raw_tokens.is_empty() => adapter.with_tables(&**served),
            _ => Ok(adapter),
        }
    }
}
