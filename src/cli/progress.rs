//! A progress bar for work that turns out to be long: on stderr, on terminals alone.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Work shorter than this shows no bar.
const PATIENCE: Duration = Duration::from_secs(2);

/// Progress of one piece of work.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    since: Instant,
    visible: bool,
    terminal: bool,
}

impl Progress {
    /// `length` steps of `what`.
    pub fn new(what: &'static str, length: usize) -> Self {
        let bar = ProgressBar::with_draw_target(Some(length as u64), ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template("{prefix} {bar:24} {pos}/{len} {elapsed} {wide_msg}") {
            bar.set_style(style);
        }
        bar.set_prefix(what);
        Self { bar, since: Instant::now(), visible: false, terminal: std::io::stderr().is_terminal() }
    }

    /// A step is about to start.
    pub fn start(&mut self, message: &str) {
        if self.terminal && !self.visible && self.since.elapsed() > PATIENCE {
            self.visible = true;
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        if self.visible {
            self.bar.set_message(message.to_owned());
        }
    }

    /// A step is done.
    pub fn done(&mut self) {
        self.bar.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
