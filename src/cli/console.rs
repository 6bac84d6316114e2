//! What goes to stdout and stderr: one document on stdout, everything else on stderr.

use std::io::{ErrorKind, Write};

use comfy_table::{Attribute, Cell, CellAlignment, ContentArrangement, Table, presets};
use lorapool::adapter::Notice;
use serde::Serialize;

use super::failure::Failure;

/// Where a command's results go.
#[derive(Clone, Copy, Debug)]
pub struct Console {
    json: bool,
}

impl Console {
    /// `json`: results and errors as JSON on stdout.
    pub fn new(json: bool) -> Self {
        Self { json }
    }

    /// Prints a result: `document` in JSON mode, else what `text` makes of it.
    pub fn result<T: Serialize>(&self, document: &T, text: impl FnOnce(&T) -> String) {
        let text = if self.json { json(document) } else { text(document) };
        print(anstream::stdout(), &text);
    }

    /// Prints an error.
    pub fn failure(&self, failure: &Failure) {
        let (code, message) = (failure.code(), failure.message());
        if self.json {
            let document = serde_json::json!({ "error": { "code": code, "message": message } });
            print(anstream::stdout(), &json(&document));
        } else {
            print(anstream::stderr(), &format!("{}: {message}", bad(format!("error[{code}]"))));
        }
    }
}

fn json(document: &impl Serialize) -> String {
    // Only a map with keys that aren't strings can fail, and no document has one.
    serde_json::to_string_pretty(document).unwrap_or_else(|error| format!("{{\"error\":{:?}}}", error.to_string()))
}

/// Writes a text and a line end. A reader that has gone away is no error: nobody is left to tell.
fn print(mut stream: impl Write, text: &str) {
    let printed = writeln!(stream, "{}", text.trim_end()).and_then(|()| stream.flush());
    if let Err(error) = printed
        && error.kind() != ErrorKind::BrokenPipe
    {
        tracing::error!(%error, "writing the output");
    }
}

/// A table with a header and no lines, whose rows are never broken: the same on every terminal, and in a pipe.
///
/// `right`: columns of numbers.
pub fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().map(|name| Cell::new(name).add_attribute(Attribute::Bold)));
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for &index in right {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// A table's text, without the blanks at the ends of its lines.
pub fn render(table: &Table) -> String {
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// A number with as many of four decimals as it needs.
pub fn scalar(value: f32) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Text for a heading.
pub fn bold(text: impl std::fmt::Display) -> String {
    format!("\x1b[1m{text}\x1b[0m")
}

/// Text for what went well.
pub fn good(text: impl std::fmt::Display) -> String {
    format!("\x1b[1;32m{text}\x1b[0m")
}

/// Text for what went wrong.
pub fn bad(text: impl std::fmt::Display) -> String {
    format!("\x1b[1;31m{text}\x1b[0m")
}

/// Text that most readers can skip.
pub fn dim(text: impl std::fmt::Display) -> String {
    format!("\x1b[2m{text}\x1b[0m")
}

/// A line on something that was accepted but that the adapter's owner should know.
pub fn remark(adapter: &str, notice: &Notice) -> String {
    let about = if adapter.is_empty() { String::new() } else { format!("{adapter}: ") };
    format!("{} {about}{}: {}\n", bold("notice"), notice.code, notice.message)
}

/// A number of bytes for people: `1.5 MiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if count < 1024 {
        return format!("{count} B");
    }
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would print as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A count for people: `1,234,567`.
pub fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_rounded_to_the_unit_that_people_expect() {
        let texts = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 20, u64::MAX].map(bytes);
        assert_eq!(texts, ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 MiB", "16384.0 PiB"]);
    }

    #[test]
    fn counts_are_grouped_by_thousands() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
