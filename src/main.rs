//! The `lorapool` command: what devices there are, what an adapter holds, and the main job on real input.

mod cli;

fn main() -> std::process::ExitCode {
    cli::main()
}
