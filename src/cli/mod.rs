//! Arguments, dispatch, and the three exit codes. One file a subcommand; what they share is in
//! `args`, `console`, `failure` and `progress`.

mod adapters;
mod apply;
mod args;
mod audit;
mod bench;
mod conform;
mod console;
mod convert;
mod devices;
mod failure;
mod progress;
mod run;
mod soak;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::LazyLock;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use console::Console;
use failure::{Failure, Status};

/// Environment variable with the log filter.
const LOG: &str = "LORAPOOL_LOG";

/// What follows the list of commands.
const AFTER_HELP: &str = "\
    Start with `lorapool run`: it brings adapters of its own. Each command's --help has the details and examples.\n\
    Exit codes: 0 done, 1 something failed or a result was wrong, 2 wrong usage or an adapter refused by `audit`.\n\
    Set LORAPOOL_LOG=info (or debug, or a filter such as lorapool=debug,wgpu=off) for log output on stderr.";

/// The crate's version and the backends of this build.
static VERSION: LazyLock<String> =
    LazyLock::new(|| format!("{} ({})", env!("CARGO_PKG_VERSION"), lorapool::backend::names().join(", ")));

/// Many LoRA adapters resident on one GPU, a different one for every row of a batch.
///
/// Reads adapters as PEFT saved them, keeps them side by side in one pool of device memory, and adds
/// each row's own delta to a batch's outputs, on CUDA, Vulkan, WebGPU and the CPU.
#[derive(Debug, Parser)]
#[command(
    name = "lorapool",
    version = VERSION.as_str(),
    arg_required_else_help = true,
    after_help = AFTER_HELP
)]
struct Cli {
    /// Print one JSON document on stdout, errors included
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: Command,
}

// What a command does is said where its arguments are: a comment here would hide all of it but the first line.
#[derive(Debug, Subcommand)]
enum Command {
    Run(Box<run::Run>),
    Devices(devices::Devices),
    Audit(audit::Audit),
    Convert(convert::Convert),
    Apply(Box<apply::Apply>),
    Conform(conform::Conform),
    Soak(soak::Soak),
    Bench(bench::Bench),
}

/// Parses the arguments, runs the command, prints its error.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let console = Console::new(cli.json);
    let done = log().and_then(|()| match cli.command {
        Command::Run(command) => command.run(&console),
        Command::Devices(command) => command.run(&console),
        Command::Audit(command) => command.run(&console),
        Command::Convert(command) => command.run(&console),
        Command::Apply(command) => command.run(&console),
        Command::Conform(command) => command.run(&console),
        Command::Soak(command) => command.run(&console),
        Command::Bench(command) => command.run(&console),
    });
    let status = done.unwrap_or_else(|failure| {
        console.failure(&failure);
        failure.status()
    });
    ExitCode::from(status as u8)
}

/// What clap has to say: help and version on stdout, anything else as an error of usage.
fn usage(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // Nothing to do for a closed pipe.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return ExitCode::from(Status::Refused as u8);
    }
    let json = std::env::args_os().any(|arg| arg == "--json");
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text).trim_end();
    // In JSON what is wrong, without how it is done right.
    let paragraph = text.split("\n\n").next().unwrap_or(text).split_whitespace().collect::<Vec<_>>().join(" ");
    let failure = Failure::usage(if json { paragraph } else { text.to_owned() });
    Console::new(json).failure(&failure);
    ExitCode::from(failure.status() as u8)
}

/// Log output on stderr, by default warnings, errors, and what takes seconds before anything else can start.
fn log() -> Result<(), Failure> {
    let directives = std::env::var(LOG).unwrap_or_else(|_| "warn,lorapool::adapter::vectors=info".into());
    let filter =
        EnvFilter::try_new(&directives).map_err(|error| Failure::usage(format!("{LOG}={directives}: {error}")))?;
    let ansi = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_timer(tracing_subscriber::fmt::time::uptime())
        .with_writer(std::io::stderr)
        .with_ansi(ansi)
        .init();
    Ok(())
}
