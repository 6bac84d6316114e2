//! What the machine says about itself.

use std::fs;

/// Bytes of memory that this process may use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub(super) total: u64,
    pub(super) available: u64,
}

/// The machine's memory, or the container's where that is less. `None` where the system doesn't say.
pub(super) fn memory() -> Option<Memory> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = info.lines().find_map(|l| l.strip_prefix(name))?;
        let kib: u64 = line.trim_start_matches(':').trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    };
    let machine = Memory { total: field("MemTotal")?, available: field("MemAvailable")? };
    Some(match container() {
        Some(limit) if limit.total < machine.total => {
            Memory { total: limit.total, available: limit.available.min(machine.available) }
        }
        _ => machine,
    })
}

/// The control group's limit, version 2 or 1.
fn container() -> Option<Memory> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let of = |limit: &str, usage: &str| {
        let total = number(limit)?;
        Some(Memory { total, available: total.saturating_sub(number(usage)?) })
    };
    of("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
        .or_else(|| of("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"))
}

/// The processor's name, or its architecture where the system doesn't name it.
pub(super) fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}
