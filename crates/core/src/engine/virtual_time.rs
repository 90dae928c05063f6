//! The engine at rates that none of our machines reaches, in virtual time: storage, a device and an engine thread with
//! given durations. No real bytes move. The plan, the state machine, the limits of depth and staging, and the record of
//! waits are those of every load. The tests show that none of these limits the load.

use super::{Action, Bounds, Engine, Event, Slabs};
use crate::error::Error;
use crate::extent::{Lane, Ticket};
use crate::format::Checkpoint;
use crate::options::{grants, pool_bytes, Options, Order};
use crate::plan::layout::{Layout, Target};
use crate::plan::schedule::{FileTraits, Limits, Schedule};
use crate::plan::want::Want;
use crate::stats::{Report, Tally};
use crate::way::Way;
use std::cell::Cell;
use std::fmt::Write as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// GB/s.
const GB: f64 = 1e9;
/// Seconds from an event until the thread that sleeps on it works: about 10 us on a quiet machine, several times that
/// in a virtual machine.
const WAKE: f64 = 30e-6;
/// CPU seconds of the engine thread per action: the system calls to submit a read of 4 MiB, or a message to the thread of a
/// GPU, and the engine's own share.
const ACTION: f64 = 4e-6;
/// Seconds to register a slab of 4 MiB with a GPU's driver: published figures are 65 to 95 ms per GiB, first touch
/// included.
const REGISTER: f64 = 0.37e-3;
/// Least reads in flight of a load that does not set the depth.
const DEPTH: usize = 16;

/// A store of bytes, or a link: one transfer after the other at `rate` bytes per second. The end of each is seen
/// `latency` later.
#[derive(Debug, Clone, Copy)]
struct Pipe {
    rate: f64,
    latency: f64,
    free_at: f64,
}

impl Pipe {
    fn new(rate: f64, latency: f64) -> Pipe {
        Pipe { rate, latency, free_at: 0.0 }
    }

    /// When the thread that started a transfer at `now` can see its end.
    fn carry(&mut self, now: f64, bytes: u64) -> f64 {
        self.free_at = self.free_at.max(now) + bytes as f64 / self.rate;
        self.free_at + self.latency
    }
}

/// Slabs, counted. Registered slabs are available at once, the others as the pinning thread registers them.
struct Pool {
    most: usize,
    registered: usize,
    now: Rc<Cell<f64>>,
    out: Rc<Cell<usize>>,
    peak: usize,
}

impl Pool {
    fn there(&self) -> usize {
        (self.registered + (self.now.get() / REGISTER) as usize).min(self.most)
    }

    /// When the next slab will be registered.
    fn next(&self) -> f64 {
        match self.there() {
            all if all == self.most => f64::INFINITY,
            there => (there - self.registered + 1) as f64 * REGISTER + 1e-9,
        }
    }
}

struct Slab(Rc<Cell<usize>>);

impl Drop for Slab {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Slabs for Pool {
    type Slab = Slab;
    fn acquire(&mut self) -> Result<Option<Slab>, Error> {
        if self.out.get() == self.there() {
            return Ok(None);
        }
        self.out.set(self.out.get() + 1);
        self.peak = self.peak.max(self.out.get());
        Ok(Some(Slab(self.out.clone())))
    }
}

/// The machine that a load runs on.
struct Machine {
    /// One for each file.
    volumes: Vec<Pipe>,
    device: Pipe,
    depth: usize,
    slabs: usize,
    /// Slabs that earlier loads have registered.
    registered: usize,
    /// First uses of a slab that the thread that submits copies has to register.
    registers: usize,
    /// How the destination is allocated; `None`: it is there.
    allocation: Option<Allocation>,
}

/// Device memory that the caller allocates while the load runs.
#[derive(Debug, Clone, Copy)]
struct Allocation {
    /// Seconds per byte.
    pace: f64,
    /// In groups, as [`grants`] has them. Otherwise all is granted together.
    in_groups: bool,
}

impl Machine {
    /// With the depth and the staging memory of every load to a GPU that sets neither, after the pool has grown.
    fn new(volumes: Vec<Pipe>, device: Pipe) -> Machine {
        let options = Options::default();
        let slabs = (pool_bytes(options.staging, options.extent) / options.extent) as usize;
        Machine { volumes, device, depth: DEPTH, slabs, registered: slabs, registers: 0, allocation: None }
    }
}

struct Outcome {
    seconds: f64,
    report: Report,
    /// Most bytes of slabs.
    staging: u64,
}

/// Tensors of Llama-3-8B, BF16, in so many files of about one size: 16 GB. Only the distribution over the files is
/// invented.
fn llama(files: usize) -> (Checkpoint, tempfile::TempDir) {
    let mut tensors: Vec<(String, u64)> = vec![("model.embed_tokens.weight".into(), 128_256 * 4096)];
    for layer in 0..32 {
        for (name, elements) in [
            ("input_layernorm", 4096),
            ("mlp.down_proj", 4096 * 14_336),
            ("mlp.gate_proj", 4096 * 14_336),
            ("mlp.up_proj", 4096 * 14_336),
            ("post_attention_layernorm", 4096),
            ("self_attn.k_proj", 1024 * 4096),
            ("self_attn.o_proj", 4096 * 4096),
            ("self_attn.q_proj", 4096 * 4096),
            ("self_attn.v_proj", 1024 * 4096),
        ] {
            tensors.push((format!("model.layers.{layer}.{name}.weight"), elements));
        }
    }
    tensors.push(("model.norm.weight".into(), 4096));
    tensors.push(("lm_head.weight".into(), 128_256 * 4096));
    assert_eq!(tensors.iter().map(|t| 2 * t.1).sum::<u64>(), 16_060_522_496);
    checkpoint(tensors, files)
}

/// GPT-2's tensors, F32 as pairs of BF16, in one file: 548 MB.
fn gpt2() -> (Checkpoint, tempfile::TempDir) {
    const D: u64 = 768;
    let mut tensors: Vec<(String, u64)> = vec![("wte.weight".into(), 50_257 * D), ("wpe.weight".into(), 1024 * D)];
    for layer in 0..12 {
        for (name, elements) in [
            ("ln_1.weight", D),
            ("ln_1.bias", D),
            ("attn.bias", 1024 * 1024),
            ("attn.c_attn.weight", 3 * D * D),
            ("attn.c_attn.bias", 3 * D),
            ("attn.c_proj.weight", D * D),
            ("attn.c_proj.bias", D),
            ("ln_2.weight", D),
            ("ln_2.bias", D),
            ("mlp.c_fc.weight", 4 * D * D),
            ("mlp.c_fc.bias", 4 * D),
            ("mlp.c_proj.weight", 4 * D * D),
            ("mlp.c_proj.bias", D),
        ] {
            tensors.push((format!("h.{layer}.{name}"), elements));
        }
    }
    tensors.push(("ln_f.weight".into(), D));
    tensors.push(("ln_f.bias".into(), D));
    tensors.iter_mut().for_each(|t| t.1 *= 2);
    checkpoint(tensors, 1)
}

/// A checkpoint of these tensors, BF16, in so many files of about one size.
fn checkpoint(tensors: Vec<(String, u64)>, files: usize) -> (Checkpoint, tempfile::TempDir) {
    let total: u64 = tensors.iter().map(|t| 2 * t.1).sum();
    let folder = tempfile::tempdir().unwrap();
    let (mut paths, mut left, mut before) = (Vec::new(), tensors.into_iter().peekable(), 0u64);
    for file in 0..files {
        let (mut json, mut at) = (String::from("{"), 0u64);
        let until = total * (file as u64 + 1) / files as u64;
        while let Some((name, elements)) = left.next_if(|t| before + at + t.1 <= until) {
            let (comma, past) = (if at > 0 { "," } else { "" }, at + 2 * elements);
            write!(json, r#"{comma}"{name}":{{"dtype":"BF16","shape":[{elements}],"data_offsets":[{at},{past}]}}"#)
                .unwrap();
            at = past;
        }
        json.push('}');
        before += at;
        let path = folder.path().join(format!("{file}.safetensors"));
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        // The header, and a hole.
        std::fs::write(&path, &bytes).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(bytes.len() as u64 + at).unwrap();
        paths.push(path);
    }
    (Checkpoint::open(&paths).unwrap(), folder)
}

/// Loads the 16 GB onto the device.
fn load(machine: Machine) -> Outcome {
    let (checkpoint, _folder) = llama(machine.volumes.len());
    load_of(&checkpoint, machine)
}

fn load_of(checkpoint: &Checkpoint, machine: Machine) -> Outcome {
    let Machine { mut volumes, mut device, depth, slabs, registered, mut registers, allocation } = machine;
    let options = Options::default();
    let way = Way { cold: Lane::DIRECT, ..Way::default() };
    let traits: Vec<FileTraits> = (0..volumes.len() as u32)
        .map(|storage| FileTraits { storage, unit: Some(512), way, ..FileTraits::default() })
        .collect();
    let limits =
        Limits { extent: options.extent, gap: options.least_gap(), scatter: None, direct_in_place: true, window: None };
    let layout = Arc::new(Layout::new(checkpoint, &Want::all(checkpoint), &Target::Gpu, Order::File).unwrap());
    let schedule = Arc::new(Schedule::new(checkpoint, &layout, &traits, &limits));
    let bounds = Bounds { depth, requests: depth, window: None, sent: None, stall: nanos(60.0) };
    let mut engine: Engine<Slab> = Engine::new(schedule.clone(), layout.clone(), bounds);
    let sizes: Vec<u64> = layout.blocks.iter().map(|block| block.nbytes).collect();
    let groups = match allocation {
        Some(Allocation { in_groups: true, .. }) => grants(&sizes),
        _ => std::iter::once(0..sizes.len()).collect(),
    };
    let (pace, mut allocated) = (allocation.map_or(0.0, |a| a.pace), 0.0);
    let mut coming = groups.into_iter().map(|group| {
        allocated += sizes[group.clone()].iter().sum::<u64>() as f64 * pace;
        (allocated, group)
    });
    let mut granted = coming.next();

    let clock = Rc::new(Cell::new(0.0));
    let mut pool = Pool { most: slabs, registered, now: clock.clone(), out: Rc::default(), peak: 0 };
    let (mut reads, mut copies) = (InFlight::new(), InFlight::new());
    let (mut tally, mut now) = (Tally::default(), 0.0f64);
    loop {
        engine.turn(nanos(now));
        while let Some((_, group)) = granted.take_if(|(at, _)| *at <= now) {
            group.for_each(|block| engine.on(nanos(now), Event::Granted(block as u32)));
            granted = coming.next();
        }
        for (_, extent) in ended(&mut reads, now) {
            let len = schedule.extents[extent as usize].len;
            engine.on(nanos(now), Event::ReadDone(Ticket(extent.into()), Ok(len), len));
        }
        for (_, extent) in ended(&mut copies, now) {
            engine.on(nanos(now), Event::CopyDone(Ticket(extent.into()), Ok(()), Vec::new()));
        }
        clock.set(now);
        while let Some(action) = engine.next(nanos(now), &mut pool) {
            now += ACTION;
            clock.set(now);
            match action {
                Action::Read { extent } => {
                    let e = &schedule.extents[extent as usize];
                    reads.push((volumes[e.file as usize].carry(now, e.len), extent));
                }
                // Through the device's own thread; another thread sees the end.
                Action::Copy { extent } => {
                    if registers > 0 {
                        registers -= 1;
                        device.free_at = device.free_at.max(now) + REGISTER;
                    }
                    let done = device.carry(now + WAKE, schedule.extents[extent as usize].wanted);
                    copies.push((done + WAKE, extent));
                }
                other => panic!("{other:?} in a load that goes well"),
            }
        }
        while engine.ready().is_some() {}
        if let Some(outcome) = engine.outcome() {
            outcome.unwrap();
            break;
        }
        let of_memory = granted.as_ref().map_or(f64::INFINITY, |(at, _)| *at);
        let next = reads.iter().chain(&copies).map(|f| f.0).fold(pool.next().min(of_memory), f64::min);
        assert!(next.is_finite(), "nothing is in flight and the load has not ended");
        let woken = next.max(now) + if next > now { WAKE } else { 0.0 };
        let slept = Duration::from_secs_f64(woken - now);
        tally.add(engine.waits_for(), engine.reads_in_flight(), engine.copies_in_flight(), slept);
        now = woken;
    }
    let mut report = Report { waits: tally.waits(), ..Report::default() };
    report.find_bottleneck(Duration::ZERO);
    Outcome { seconds: now, report, staging: pool.peak as u64 * options.extent }
}

/// The engine's clock.
fn nanos(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

/// When the read or copy of each extent ends.
type InFlight = Vec<(f64, u32)>;

/// Removes what has ended by now.
fn ended(flights: &mut InFlight, now: f64) -> InFlight {
    let (done, rest) = std::mem::take(flights).into_iter().partition(|flight| flight.0 <= now);
    *flights = rest;
    done
}

const NBYTES: f64 = 16_060_522_496.0;

/// Share of the slower side's rate that the load reached.
fn share(slower: f64, outcome: &Outcome) -> f64 {
    NBYTES / slower / outcome.seconds
}

/// Two sides as fast as a socket's memory, two faster ones, and pairs with one clearly slower side: 0.95 of that side,
/// in 256 MiB.
#[test]
fn the_slower_side_is_busy_all_the_time_at_55_gb_per_second_and_more() {
    for (source, device, bottleneck) in [
        (55.0, 120.0, "source"),
        (120.0, 55.0, "device"),
        (55.0, 66.0, "source"),
        (66.0, 55.0, "device"),
        (100.0, 400.0, "source"),
        (400.0, 100.0, "device"),
        (200.0, 400.0, "source"),
        (400.0, 200.0, "device"),
    ] {
        for latency in [20e-6, 100e-6, 200e-6] {
            let machine = Machine::new(vec![Pipe::new(source * GB, latency)], Pipe::new(device * GB, 10e-6));
            let outcome = load(machine);
            let share = share(source.min(device) * GB, &outcome);
            let seen = format!(
                "{source} GB/s after {:.0} us into {device} GB/s: {share:.3} of the slower, {} MiB, {:?}",
                latency * 1e6,
                outcome.staging >> 20,
                outcome.report.waits
            );
            println!("{seen}");
            assert!((0.95..=1.0).contains(&share), "{seen}");
            assert!(outcome.staging <= 256 << 20, "{seen}");
            assert_eq!(outcome.report.bottleneck, bottleneck, "{seen}");
        }
    }
}

/// Equal rates: either side may be called the slower one.
#[test]
fn two_sides_of_one_rate_reach_it() {
    for rate in [55.0, 100.0, 200.0] {
        let outcome = load(Machine::new(vec![Pipe::new(rate * GB, 100e-6)], Pipe::new(rate * GB, 10e-6)));
        let share = share(rate * GB, &outcome);
        println!("{rate} GB/s into as much: {share:.3}, {} MiB", outcome.staging >> 20);
        assert!((0.95..=1.0).contains(&share), "{rate} GB/s: {share:.3}");
    }
}

/// Drives side by side that are slower than the device in sum: all of them are busy.
#[test]
fn volumes_side_by_side_give_the_sum_of_their_rates() {
    for (volumes, device) in [(4, 64.0), (4, 200.0), (8, 200.0)] {
        let outcome = load(Machine::new(vec![Pipe::new(14.0 * GB, 100e-6); volumes], Pipe::new(device * GB, 10e-6)));
        let share = share(14.0 * GB * volumes as f64, &outcome);
        println!("{volumes} of 14 GB/s into {device} GB/s: {share:.3}, {} MiB", outcome.staging >> 20);
        assert!((0.95..=1.0).contains(&share), "{volumes} volumes into {device} GB/s: {share:.3}");
        assert_eq!(outcome.report.bottleneck, "source", "{:?}", outcome.report.waits);
    }
}

/// The result of the tests above if depth or staging were too small: a load that waits for one step before it starts the
/// other reaches half of two equal sides, and a load that reads one extent at a time pays every latency in full.
#[test]
fn a_depth_or_a_ring_that_is_too_small_would_be_seen() {
    let machine = |depth, slabs| Machine {
        depth,
        slabs,
        ..Machine::new(vec![Pipe::new(55.0 * GB, 100e-6)], Pipe::new(55.0 * GB, 10e-6))
    };
    for (depth, slabs, most) in [(1, 64, 0.5), (16, 1, 0.4), (2, 2, 0.7)] {
        let share = share(55.0 * GB, &load(machine(depth, slabs)));
        assert!(share < most, "depth {depth}, {slabs} slabs: {share:.3}");
    }
}

/// A first load of 16 GB over a link of 53 GB/s, whose memory takes 30 ms per GiB to allocate (cudaMalloc: 4 to 30 have been
/// published), takes hardly longer than the slower of the two; 10 and 100 ms per GiB are on either side of the link.
#[test]
fn memory_that_is_allocated_meanwhile_hardly_costs_time() {
    let link = NBYTES / (53.0 * GB);
    let loaded = |per_gib: f64, in_groups| {
        let allocation = Some(Allocation { pace: per_gib / (1u64 << 30) as f64, in_groups });
        let machine = Machine::new(vec![Pipe::new(100.0 * GB, 100e-6)], Pipe::new(53.0 * GB, 10e-6));
        load(Machine { registered: 0, allocation, ..machine }).seconds
    };
    for per_gib in [4e-3, 10e-3, 19e-3, 30e-3, 100e-3] {
        let alone = NBYTES / (1u64 << 30) as f64 * per_gib;
        let (slower, seconds) = (alone.max(link), loaded(per_gib, true));
        println!("{:.0} ms per GiB: allocation {alone:.3} s, link {link:.3} s, load {seconds:.3} s", per_gib * 1e3);
        assert!(seconds <= 1.15 * slower, "{seconds} s for {slower} s");
    }
    // Granted all together, one follows the other
    let (alone, together) = (NBYTES / (1u64 << 30) as f64 * 30e-3, loaded(30e-3, false));
    assert!(together > 0.97 * (alone + link), "{together} s");
}

/// A later load of GPT-2 must take at most 15 ms. Its plan and hand-out take at most 4 of them, as
/// `tests/test_gpu_pool.py` measures. This is the rest.
const GPT2_MOVED: f64 = 11e-3;

fn gpt2_at_55_gb_per_second(slabs_of: impl Fn(Machine) -> Machine) -> f64 {
    let (checkpoint, _folder) = gpt2();
    assert_eq!((checkpoint.nbytes(), checkpoint.len()), (548_090_880, 160));
    let machine = Machine::new(vec![Pipe::new(55.0 * GB, 100e-6)], Pipe::new(55.0 * GB, 10e-6));
    let outcome = load_of(&checkpoint, slabs_of(machine));
    println!("GPT-2: {:.2} ms, {} MiB", outcome.seconds * 1e3, outcome.staging >> 20);
    outcome.seconds
}

#[test]
fn a_later_load_of_gpt2_takes_hardly_longer_than_the_link() {
    let seconds = gpt2_at_55_gb_per_second(|machine| machine);
    assert!((9.96e-3..GPT2_MOVED).contains(&seconds), "{seconds}");
}

/// The pool grows while copies run: the first load waits for its first slab, then the link is slower than the pinning.
#[test]
fn the_first_load_of_gpt2_waits_for_few_registrations() {
    let seconds = gpt2_at_55_gb_per_second(|machine| Machine { registered: 0, ..machine });
    assert!(seconds < GPT2_MOVED + 2e-3, "{seconds}");
}

/// The result of the two tests above if the thread that submits registered 48 of 64 slabs again.
#[test]
fn slabs_that_are_registered_in_every_load_would_be_seen() {
    let seconds = gpt2_at_55_gb_per_second(|machine| Machine { registers: 48, ..machine });
    assert!(seconds > 15e-3, "{seconds}");
}
