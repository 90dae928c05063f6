//! Loads a checkpoint into CPU memory, compares every byte with a plain read of the files, and prints the report.
//!
//! ```text
//! cargo run --release -p load -- [--copy] [--io auto|buffered|direct|uring|threads] [--unchecked] [--open] PATH...
//! ```
//!
//! `PATH` is a shard file, several, a directory or an index file. `--copy` asks for private memory even if a file could
//! be mapped. `--unchecked` omits the comparison and the report, and `--open` also the load: for tools that count the
//! cost of the rest. The duration of each step goes to standard output, an error to standard error.

use penstock::format::Checkpoint;
use penstock::load::Load;
use penstock::options::{Io, Options};
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::want::Want;
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("load: {e}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut options = Options::default();
    let mut paths = Vec::new();
    let (mut checked, mut loaded) = (true, true);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--copy" => options.copy = Some(true),
            "--unchecked" => checked = false,
            "--open" => loaded = false,
            "--io" => options.io = io(&arguments.next().ok_or("--io wants a value")?)?,
            _ => paths.push(argument),
        }
    }
    if paths.is_empty() {
        return Err("give a shard file, several, a directory or an index file".into());
    }

    let at = Instant::now();
    let checkpoint = Arc::new(Checkpoint::open(&paths)?);
    println!("open   {:9.3} ms: {} tensors in {} files", ms(at), checkpoint.len(), checkpoint.files().len());
    if !loaded {
        return Ok(());
    }

    let at = Instant::now();
    let wants = Want::all(&checkpoint);
    let request = Request {
        checkpoint: checkpoint.clone(),
        wants,
        layout: None,
        device: Where::Cpu,
        memory: Memory::Ours,
        options,
        stream: false,
    };
    let load = Load::start(request)?;
    println!("plan   {:9.3} ms", ms(at));
    load.wait(None)?;
    println!("load   {:9.3} ms: {} bytes", ms(at), load.progress().1);

    let at = Instant::now();
    let views = (0..checkpoint.len() as u32).map(|want| load.view(want)).collect::<Result<Vec<_>, _>>()?;
    println!("views  {:9.3} ms", ms(at));
    let report = load.report();
    drop(load);
    if !checked {
        return Ok(());
    }

    let mut expected = Vec::new();
    let files = checkpoint.files().iter().map(|f| File::open(&f.spelled)).collect::<Result<Vec<_>, _>>()?;
    for (tensor, view) in checkpoint.tensors().zip(&views) {
        expected.resize(tensor.nbytes() as usize, 0);
        files[tensor.file as usize].read_exact_at(&mut expected, tensor.begin)?;
        // SAFETY: the load is over and the view keeps these bytes, which nobody else writes to.
        let loaded = unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
        if loaded != expected {
            return Err(format!("{}: the bytes differ from those of the file", tensor.name).into());
        }
    }
    println!("every byte is that of the files");
    let at = Instant::now();
    drop(views);
    println!("drop   {:9.3} ms", ms(at));
    println!("{report:#?}");
    Ok(())
}

fn io(name: &str) -> Result<Io, String> {
    Ok(match name {
        "auto" => Io::Auto,
        "buffered" => Io::Buffered,
        "uring_buffered" => Io::UringBuffered,
        "direct" => Io::Direct,
        "uring" => Io::Uring,
        "threads" => Io::Threads,
        _ => return Err(format!("--io {name}: give auto, buffered, direct, uring or threads")),
    })
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}
