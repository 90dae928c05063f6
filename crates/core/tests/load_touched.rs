//! Loads that fail half-way into the caller's memory name exactly those destinations that have an overwritten byte. Random
//! tensors, parts, strides and casts; reads that break at a random byte. No byte of a file is the byte that memory is filled
//! with before, so each write shows.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod toy_store;

use penstock::extent::TakesSlab;
use penstock::options::{Io, Options};
use penstock::plan::strides::Foreign;
use penstock::plan::want::{AxisSlice, Want};
use penstock::store::register;
use penstock::{Checkpoint, DType, ErrorKind, Load, Memory, Request, Where};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use toy_store::{Contents, Fault, Server, Toy};

const POISON: u8 = 0xee;
const KIB: u64 = 1 << 10;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// A part of `0..n`, never empty.
    fn part(&mut self, n: u64) -> AxisSlice {
        let (a, b) = (self.below(n), self.below(n));
        AxisSlice::from(a.min(b)..a.max(b) + 1)
    }
}

struct Tensor {
    dtype: (&'static str, u64),
    shape: [u64; 2],
}

impl Tensor {
    fn random(wide: bool, random: &mut Random) -> Tensor {
        let dtype = [("U8", 1), ("BF16", 2), ("F32", 4)][random.below(3) as usize];
        let most = [3, 40, 3000][random.below(3) as usize];
        let columns = if wide { 5000 + random.below(5000) } else { 1 + random.below(most) };
        Tensor { dtype, shape: [1 + random.below(30), columns] }
    }

    fn nbytes(&self) -> u64 {
        self.dtype.1 * self.shape[0] * self.shape[1]
    }
}

/// A shard file of these, and where their data begin.
fn shard(tensors: &[Tensor], random: &mut Random) -> (Vec<u8>, u64) {
    let (mut entries, mut at) = (Vec::new(), 0);
    for (i, tensor) in tensors.iter().enumerate() {
        let (past, dtype, shape) = (at + tensor.nbytes(), tensor.dtype.0, tensor.shape);
        entries.push(format!(r#""{i:02}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{at},{past}]}}"#));
        at = past;
    }
    let json = format!("{{{}}}", entries.join(","));
    let json = format!("{json:w$}", w = json.len().next_multiple_of(8));
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    let start = bytes.len() as u64;
    // Nor is a float that is rounded to BF16.
    bytes.extend((0..at).map(|_| random.below(0xe0) as u8));
    (bytes, start)
}

/// The caller's tensor for a part of one: contiguous, with longer rows, every other element, transposed, or of another dtype.
fn destination(tensor: &Tensor, counts: [u64; 2], wide: bool, random: &mut Random) -> (&'static mut [u8], Foreign) {
    let cast = (!wide && tensor.dtype.0 == "F32" && random.below(3) == 0).then_some((DType::BF16, 2));
    let size = cast.map_or(tensor.dtype.1, |cast| cast.1);
    let [rows, columns] = counts;
    let steps = match if wide { 3 * random.below(2) } else { random.below(5) } {
        0 => [size * (columns + 5), size],
        1 => [2 * size * columns, 2 * size],
        2 => [size, size * rows],
        _ => [size * columns, size],
    };
    let span = (rows - 1) * steps[0] + (columns - 1) * steps[1] + size;
    let memory = vec![POISON; span as usize].leak();
    let dims = Some([(rows, steps[0]), (columns, steps[1])].into());
    let into = Foreign { address: memory.as_mut_ptr() as u64, nbytes: span, dims, cast: cast.map(|cast| cast.0) };
    (memory, into)
}

/// How a load ended: what it overwrote, and how many destinations it had.
struct Ended {
    touched: usize,
    of: usize,
    in_place: bool,
    failed: bool,
}

fn load(seed: u64) -> Ended {
    let random = &mut Random(seed);
    // Rows that reads bring to their places themselves.
    let wide = random.below(2) == 0;
    let mut tensors: Vec<Tensor> = (0..3 + random.below(8)).map(|_| Tensor::random(wide, random)).collect();
    // The largest elements first: none is misaligned, and each may be cast.
    tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.1));
    let (bytes, start) = shard(&tensors, random);
    let len = bytes.len() as u64;
    let (contents, scheme) = (Contents::new(Mutex::default()), format!("touched{seed}"));
    let address = format!("{scheme}://bucket/model.safetensors");
    contents.lock().unwrap().insert(address.clone(), (Arc::new(bytes), "one".into()));
    let mut server = Server::of(&contents);
    server.latency = Duration::ZERO;
    server.staging = if random.below(3) == 0 { TakesSlab::AtArrival } else { TakesSlab::AtRequest };
    server.fault = match random.below(8) {
        0 => Fault::Fail(random.below(8)),
        1 => Fault::Short(random.below(8)),
        _ => Fault::Torn(start + random.below(len - start)),
    };
    let server = Arc::new(server);
    register(&scheme, Arc::new(Toy(server.clone()))).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&[address]).unwrap());

    let (mut wants, mut memories, mut places) = (Vec::new(), Vec::new(), Vec::new());
    let count = tensors.len() as u64;
    for i in 0..if wide { count } else { 1 + random.below(2 * count) } {
        let number = if wide { i } else { random.below(count) } as usize;
        let tensor = &tensors[number];
        let whole = tensor.shape.map(|n| AxisSlice::from(0..n));
        let region = match random.below(3) {
            0 => whole,
            1 => [random.part(tensor.shape[0]), whole[1]],
            _ if wide => [random.part(tensor.shape[0]), AxisSlice::from(100..tensor.shape[1])],
            _ => [random.part(tensor.shape[0]), random.part(tensor.shape[1])],
        };
        let (memory, into) = destination(tensor, [region[0].count(), region[1].count()], wide, random);
        let index = checkpoint.find(&format!("{number:02}")).unwrap().index;
        wants.push(Want { tensor: index, region: Some(region.to_vec().into()) });
        memories.push((memory.as_mut_ptr(), memory.len()));
        places.push(into);
    }
    let load = Load::start(Request {
        checkpoint,
        wants,
        layout: None,
        device: Where::Cpu,
        memory: Memory::Into { tensors: places, keep: Arc::new(()), fence: None },
        options: Options {
            extent: [256 * KIB, 1024 * KIB][random.below(2) as usize],
            staging: 2048 * KIB,
            depth: 1 + random.below(4) as u32,
            io: Io::Auto,
            ..Options::default()
        },
        stream: false,
    })
    .unwrap();
    let outcome = load.wait(None);
    if let Err(error) = &outcome {
        assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::Truncated), "{error}");
    }
    let (touched, report) = (load.touched(), load.report());
    drop(load);
    let is_changed = |&(at, len): &(*mut u8, usize)| {
        // SAFETY: leaked in `destination`, and nothing writes to it any more.
        unsafe { Vec::from_raw_parts(at, len, len) }.iter().any(|b| *b != POISON)
    };
    let changed: Vec<u32> = (0..).zip(&memories).filter(|m| is_changed(m.1)).map(|m| m.0).collect();
    assert_eq!(touched, changed, "seed {seed}: {:?}, {} reads", server.fault, server.reads.load(Ordering::Relaxed));
    Ended { touched: touched.len(), of: memories.len(), in_place: report.peak_staging == 0, failed: outcome.is_err() }
}

#[test]
fn what_a_load_that_fails_has_overwritten_is_what_it_says() {
    let ended: Vec<Ended> = (0..200).map(load).collect();
    // Loads of all kinds, or the test would mean little.
    let count = |what: &dyn Fn(&Ended) -> bool| ended.iter().filter(|e| what(e)).count();
    let partly = |e: &Ended| e.failed && 0 < e.touched && e.touched < e.of;
    assert!(count(&|e| !e.failed && e.touched == e.of) > 10);
    assert!(count(&|e| e.failed && e.touched == 0) > 10);
    assert!(count(&|e| partly(e) && e.in_place) > 10, "{} of {}", count(&|e| e.in_place), ended.len());
    assert!(count(&|e| partly(e) && !e.in_place) > 10);
}
