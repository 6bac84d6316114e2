//! `lorapool devices`: every backend and device, driver, limits, or why not.

use clap::Args;
use lorapool::backend::{Caps, Listing, best, list};
use serde::Serialize;
use serde_json::Value;

use super::console::{Console, bold, bytes, dim};
use super::failure::{Failure, Status};

/// List every backend and device: driver and limits, or why there is none
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  lorapool devices\n  lorapool devices --json | jq '.backends[].devices[].device'")]
pub struct Devices {}

/// The document.
#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    /// What `--backend auto` takes.
    auto: Option<Auto>,
    backends: Vec<Backend>,
}

#[derive(Debug, Serialize)]
struct Auto {
    backend: &'static str,
    device: String,
}

#[derive(Debug, Serialize)]
struct Backend {
    backend: &'static str,
    /// As [`Caps`], with null where there is no limit.
    devices: Vec<Value>,
    unavailable: Option<String>,
    #[serde(skip)]
    caps: Vec<Caps>,
}

impl From<Listing> for Backend {
    fn from(listing: Listing) -> Self {
        let devices = listing.devices.iter().map(document).collect();
        let Listing { backend, devices: caps, unavailable } = listing;
        Self { backend, devices, unavailable, caps }
    }
}

impl Devices {
    /// Lists the devices.
    pub fn run(self, console: &Console) -> Result<Status, Failure> {
        let backends: Vec<Backend> = list().into_iter().map(Backend::from).collect();
        let auto = match best() {
            Ok(backend) => Some(Auto { backend: backend.caps().backend, device: backend.caps().device.clone() }),
            Err(error) => {
                tracing::warn!(%error, "no device can be opened");
                None
            }
        };
        let report = Report { version: env!("CARGO_PKG_VERSION"), auto, backends };
        console.result(&report, text);
        Ok(Status::Done)
    }
}

/// Capabilities as JSON, `u64::MAX` as null: it means "no limit", and few parsers keep it exact.
fn document(caps: &Caps) -> Value {
    let mut value = serde_json::to_value(caps).unwrap_or_default();
    if let Value::Object(fields) = &mut value {
        for field in fields.values_mut().filter(|field| field.as_u64() == Some(u64::MAX)) {
            *field = Value::Null;
        }
    }
    value
}

fn text(report: &Report) -> String {
    let mut out = String::new();
    for backend in &report.backends {
        for (index, caps) in backend.caps.iter().enumerate() {
            out += &device(index, caps);
        }
        if let Some(reason) = &backend.unavailable {
            out += &format!("{}\n", dim(format!("{} -  {reason}", backend.backend)));
        }
    }
    match &report.auto {
        Some(auto) => out += &format!("\n--backend auto takes {}: {}", bold(auto.backend), auto.device),
        None => out += "\nno device can be opened",
    }
    out
}

/// A device in three lines.
fn device(index: usize, caps: &Caps) -> String {
    let name = |value: Value| value.as_str().unwrap_or_default().to_owned();
    let class = name(serde_json::to_value(caps.class).unwrap_or_default());
    let layout = name(serde_json::to_value(caps.layout).unwrap_or_default());
    let memory = if caps.memory == 0 { "not told".into() } else { bytes(caps.memory) };
    let [low, high] = caps.subgroup;
    let subgroup = if low == high { low.to_string() } else { format!("{low} to {high}") };
    format!(
        "{} {index}  {}\n    {class}, {}, driver {}\n    \
         memory {memory}, allocation {}, binding {}, subgroup {subgroup}, pool {layout}\n",
        bold(caps.backend),
        caps.device,
        caps.api,
        caps.driver,
        limit(caps.max_alloc),
        limit(caps.max_binding),
    )
}

fn limit(bytes_at_most: u64) -> String {
    match bytes_at_most {
        u64::MAX => "without limit".into(),
        limited => format!("up to {}", bytes(limited)),
    }
}
