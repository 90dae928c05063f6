//! Several ranks load one checkpoint together: what each gets, and who reads it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::single_range_in_vec_init)]

use penstock::error::ErrorKind;
use penstock::extent::{Lane, Ticket};
use penstock::format::Checkpoint;
use penstock::memory::Keep;
use penstock::options::{Cache, Options};
use penstock::peers::{ListenAt, Pass, Seat};
use penstock::plan::shares::{Parcel, RankWants, Shares};
use penstock::plan::want::Runs;
use penstock::source::{Destination, Progress, Read, Source};
use penstock::stats::Report;
use penstock::{Load, Memory, Request, Want, Where};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn seat(rank: u32) -> Seat {
    seat_at(HERE, rank)
}

fn seat_at(address: IpAddr, rank: u32) -> Seat {
    Seat::new(ListenAt::anywhere(address), Pass { rank, token: [rank as u8; 16], key: None }).unwrap()
}

/// Random numbers that are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Writes a shard of tensors with these shapes, two bytes an element, and random content.
fn write(path: &Path, tensors: &[(String, Vec<u64>)], random: &mut Random) {
    let (mut json, mut at) = (String::from("{"), 0);
    for (name, shape) in tensors {
        let comma = if json.len() > 1 { "," } else { "" };
        let past = at + 2 * shape.iter().product::<u64>();
        write!(json, r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{at},{past}]}}"#).unwrap();
        at = past;
    }
    json.push('}');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.extend((0..at).map(|_| random.next() as u8));
    std::fs::write(path, bytes).unwrap();
}

struct Model {
    checkpoint: Arc<Checkpoint>,
    contents: Vec<Vec<u8>>,
    _folder: tempfile::TempDir,
}

impl Model {
    /// Two shards.
    fn new(tensors: &[(String, Vec<u64>)], random: &mut Random) -> Model {
        let folder = tempfile::tempdir().unwrap();
        let half = tensors.len() / 2;
        let paths = ["model-1.safetensors", "model-2.safetensors"].map(|name| folder.path().join(name));
        write(&paths[0], &tensors[..half], random);
        write(&paths[1], &tensors[half..], random);
        let contents = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
        let checkpoint = Arc::new(Checkpoint::open(&paths).unwrap());
        Model { checkpoint, contents, _folder: folder }
    }

    fn expected(&self, want: &Want) -> Vec<u8> {
        let runs = Runs::of(&self.checkpoint, want).unwrap();
        let file = &self.contents[self.checkpoint.tensor(want.tensor).file as usize];
        let run = |i| &file[runs.offset(i) as usize..(runs.offset(i) + runs.len) as usize];
        (0..if runs.len > 0 { runs.count() } else { 0 }).flat_map(run).copied().collect()
    }

    /// Each rank's load in a thread of its own: its report, or its error.
    fn load(&self, lists: &[Vec<Want>], options: &Options) -> Vec<penstock::Result<Report>> {
        let of_rank: Vec<u32> = (0..lists.len() as u32).collect();
        let shares = Shares::new(&self.checkpoint, RankWants { lists, of_rank: &of_rank }).unwrap();
        self.load_as(shares, lists, options, &[])
    }

    /// The same, divided in a given way. Reads of `slow` parcels take so much longer.
    fn load_as(
        &self,
        shares: Shares,
        lists: &[Vec<Want>],
        options: &Options,
        slow: &[(Parcel, Duration)],
    ) -> Vec<penstock::Result<Report>> {
        self.load_at((0..lists.len() as u32).map(seat).collect(), shares, lists, options, slow)
    }

    /// The same, where the ranks listen at these addresses.
    fn load_at(
        &self,
        seats: Vec<Seat>,
        shares: Shares,
        lists: &[Vec<Want>],
        options: &Options,
        slow: &[(Parcel, Duration)],
    ) -> Vec<penstock::Result<Report>> {
        let shares = Arc::new(shares);
        let addresses: Vec<SocketAddr> = seats.iter().map(|seat| seat.address().unwrap()).collect();
        std::thread::scope(|scope| {
            let ranks = seats.into_iter().zip(lists).zip(0..).map(|((seat, wants), rank)| {
                let (shares, addresses) = (shares.clone(), &addresses);
                scope.spawn(move || {
                    let mesh = seat.join(
                        &addresses.iter().copied().map(Some).collect::<Vec<_>>(),
                        [7; 16],
                        Duration::from_secs(20),
                        || true,
                    )?;
                    let request = Request {
                        checkpoint: self.checkpoint.clone(),
                        wants: wants.clone(),
                        layout: None,
                        device: Where::Cpu,
                        memory: Memory::Ours,
                        options: options.clone(),
                        stream: false,
                    };
                    let load = Load::start_in_group_through(request, (shares, mesh), |inner, _| {
                        Ok(Box::new(Slow { inner, parcels: slow.to_vec() }))
                    })?;
                    load.wait(None)?;
                    for (number, want) in (0..).zip(wants) {
                        let view = load.view(number).unwrap();
                        // SAFETY: the view keeps its bytes, and nobody writes to them.
                        let found =
                            unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
                        assert!(found == self.expected(want), "rank {rank}, want {number} of tensor {}", want.tensor);
                    }
                    Ok(load.report())
                })
            });
            let ranks: Vec<_> = ranks.collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }
}

/// A source that takes longer for reads that begin in some parcels.
struct Slow {
    inner: Box<dyn Source>,
    parcels: Vec<(Parcel, Duration)>,
}

impl Source for Slow {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let slow = |p: &Parcel| p.file == read.file && (p.start..p.end).contains(&(read.offset + read.need - 1));
        if let Some((_, longer)) = self.parcels.iter().find(|(parcel, _)| slow(parcel)) {
            std::thread::sleep(*longer);
        }
        self.inner.submit(read)
    }

    fn flush(&mut self) -> penstock::Result<()> {
        self.inner.flush()
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> penstock::Result<()> {
        self.inner.poll(events)
    }

    fn land(&mut self, ticket: Ticket, into: Destination, keep: Keep) -> penstock::Result<()> {
        self.inner.land(ticket, into, keep)
    }

    fn cancel(&mut self) {
        self.inner.cancel();
    }

    fn wake(&self) -> RawFd {
        self.inner.wake()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

/// Shapes as a transformer has them.
fn transformer() -> Vec<(String, Vec<u64>)> {
    let mut found =
        vec![("embed".to_owned(), vec![1000, 96]), ("none".to_owned(), vec![0, 96]), ("scalar".to_owned(), vec![])];
    for layer in 0..4 {
        found.push((format!("{layer}.norm"), vec![96]));
        found.push((format!("{layer}.up"), vec![2048, 96]));
        found.push((format!("{layer}.down"), vec![96, 2048]));
        found.push((format!("{layer}.experts"), vec![8, 64, 96]));
    }
    found.push(("head".to_owned(), vec![1000, 96]));
    found
}

/// A rank knows before the load only where the others listen. Who listens at another address may be on its machine too.
#[test]
fn ranks_of_one_machine_that_listen_at_different_addresses_send_each_other_what_they_read() {
    let model = Model::new(&transformer(), &mut Random(5));
    let lists = vec![Want::all(&model.checkpoint); 4];
    let shares = Shares::new(&model.checkpoint, RankWants { lists: &lists, of_rank: &[0, 1, 2, 3] }).unwrap();
    let at = |rank: u32| seat_at(IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1 + (rank / 2) as u8)), rank);
    let reports = model.load_at((0..4).map(at).collect(), shares, &lists, &Options::default(), &[]);
    for report in reports {
        let exchange = report.unwrap().exchange.unwrap();
        assert!(exchange.lent > 0 && exchange.sent > exchange.lent, "{exchange:?}");
    }
}

/// Rows of `up`, columns of `down`, whole experts; the rest on every rank.
fn sharded(checkpoint: &Checkpoint, rank: u64, ranks: u64) -> Vec<Want> {
    let part = |n: u64| n * rank / ranks..n * (rank + 1) / ranks;
    let want = |index: u32| {
        let info = checkpoint.tensor(index);
        match info.name {
            name if name.ends_with("up") => Want::part(index, [part(2048), 0..96]),
            name if name.ends_with("down") => Want::part(index, [0..96, part(2048)]),
            name if name.ends_with("experts") => Want::part(index, [part(8), 0..64, 0..96]),
            _ => Want::whole(index),
        }
    };
    (0..checkpoint.len() as u32).map(want).collect()
}

/// Bytes that this rank has read itself. What others have sent or lent has lanes of its own, and the report says so twice.
fn bytes_read(report: &Report) -> u64 {
    let received = report.routes.of(Lane::RANK).bytes + report.routes.of(Lane::NEIGHBOUR).bytes;
    assert_eq!(received, report.exchange.map_or(0, |exchange| exchange.received));
    report.routes.sum().bytes - received
}

#[test]
fn tensor_parallel_ranks_and_replicas_read_every_byte_once() {
    let model = Model::new(&transformer(), &mut Random(1));
    for ranks in [2, 3, 4] {
        for (name, lists) in [
            ("tp", (0..ranks).map(|rank| sharded(&model.checkpoint, rank, ranks)).collect::<Vec<_>>()),
            ("dp", (0..ranks).map(|_| Want::all(&model.checkpoint)).collect()),
        ] {
            for cache in [Cache::Keep, Cache::Bypass] {
                let options = Options { cache, ..Options::default() };
                let reports: Vec<Report> = model.load(&lists, &options).into_iter().map(|r| r.unwrap()).collect();
                let read: u64 = reports.iter().map(bytes_read).sum();
                let slack: u64 = reports.iter().map(|r| r.unwanted.slack + r.unwanted.gap).sum();
                let [sent, received] =
                    [|r: &Report| r.exchange.unwrap().sent, |r: &Report| r.exchange.unwrap().received]
                        .map(|of| reports.iter().map(of).sum::<u64>());
                let wanted: u64 = reports.iter().map(|r| r.nbytes).sum();
                assert_eq!(read - slack, model.checkpoint.nbytes(), "{name} {ranks} {cache:?}");
                assert_eq!(sent, received);
                // Of columns a rank reads rows, and keeps its own part of them.
                let kept = reports.iter().map(|r| r.nbytes - r.exchange.unwrap().received).sum::<u64>();
                assert_eq!(received, wanted - kept);
                if name == "dp" {
                    assert_eq!(kept, model.checkpoint.nbytes());
                }
            }
        }
    }
}

/// Random parts of random tensors.
fn random_wants(checkpoint: &Checkpoint, random: &mut Random) -> Vec<Want> {
    let mut wants = Vec::new();
    for index in 0..checkpoint.len() as u32 {
        for _ in 0..random.below(3) {
            let region = checkpoint.tensor(index).shape.iter().map(|&n| {
                let start = random.below(n + 1);
                let start = if random.below(2) == 0 { 0 } else { start };
                let end = if random.below(2) == 0 { n } else { start + random.below(n - start + 1) };
                penstock::plan::want::AxisSlice { start, end, step: 1 + random.below(2) * random.below(3) }
            });
            let region: Vec<_> = region.collect();
            wants.push(if random.below(3) == 0 { Want::whole(index) } else { Want::part(index, region) });
        }
    }
    wants
}

#[test]
fn every_wanted_byte_has_one_reader_and_comes_once() {
    let mut random = Random(2);
    for case in 0..40 {
        let tensors: Vec<(String, Vec<u64>)> = (0..1 + random.below(8))
            .map(|number| {
                let most = [1 << 21, 3000, 130, 40][random.below(3) as usize + 1];
                let shape: Vec<u64> = (0..1 + random.below(3)).map(|_| random.below(most)).collect();
                let shape = if shape.iter().product::<u64>() > 3 << 20 { vec![shape[0]] } else { shape };
                (format!("t{number}"), shape)
            })
            .collect();
        let model = Model::new(&tensors, &mut random);
        let ranks = 1 + random.below(5) as usize;
        let distinct: Vec<Vec<Want>> =
            (0..1 + random.below(ranks as u64)).map(|_| random_wants(&model.checkpoint, &mut random)).collect();
        let of_rank: Vec<u32> = (0..ranks).map(|_| random.below(distinct.len() as u64) as u32).collect();
        let shares = Shares::new(&model.checkpoint, RankWants { lists: &distinct, of_rank: &of_rank }).unwrap();
        // For each byte of each file: who wants it.
        for (file, content) in (0..).zip(&model.contents) {
            let mut wanted = vec![0u32; content.len()];
            for (rank, &list) in of_rank.iter().enumerate() {
                for want in distinct[list as usize].iter().filter(|w| model.checkpoint.tensor(w.tensor).file == file) {
                    let runs = Runs::of(&model.checkpoint, want).unwrap();
                    for i in 0..if runs.len > 0 { runs.count() } else { 0 } {
                        let (at, len) = (runs.offset(i) as usize, runs.len as usize);
                        wanted[at..at + len].iter_mut().for_each(|w| *w |= 1 << rank);
                        assert_eq!(
                            (runs.before(at as u64), runs.before((at + len) as u64)),
                            (i * runs.len, (i + 1) * runs.len)
                        );
                    }
                }
            }
            let mut at = 0;
            for parcel in shares.parcels().iter().filter(|parcel| parcel.file == file) {
                let (start, end) = (parcel.start as usize, parcel.end as usize);
                assert!(start >= at && end > start, "case {case}: parcels overlap");
                assert!(end - start <= 1 << 20, "case {case}: a parcel is too long");
                assert!(wanted[at..start].iter().all(|w| w.count_ones() <= 1), "case {case}: two ranks read one byte");
                let audience = shares.audience(parcel);
                assert!(audience.contains(&parcel.reader) && audience.len() > 1);
                let known = audience.iter().fold(0, |known, rank| known | 1 << rank);
                assert!(wanted[start..end].iter().all(|w| w & !known == 0), "case {case}: somebody is left out");
                at = end;
            }
            assert!(wanted[at..].iter().all(|w| w.count_ones() <= 1), "case {case}: two ranks read one byte");
        }
        let lists: Vec<Vec<Want>> = of_rank.iter().map(|&list| distinct[list as usize].clone()).collect();
        for report in model.load(&lists, &Options::default()) {
            report.unwrap();
        }
        // The same with a trial: whichever way it goes.
        let wants = RankWants { lists: &distinct, of_rank: &of_rank };
        let tried = Shares::with_trial(&model.checkpoint, wants, 8192 + random.below(1 << 18)).unwrap();
        let differ = |r: &penstock::Result<Report>| r.as_ref().unwrap().exchange.unwrap().exchanged;
        let both_ways = Steps::of(&tried).is_some();
        let reports = model.load_as(tried, &lists, &Options::default(), &[]);
        assert!(reports.iter().all(|r| differ(r) == differ(&reports[0])), "case {case}: ranks decide differently");
        for report in reports {
            assert_eq!(report.unwrap().exchange.unwrap().tried.is_some(), both_ways, "case {case}");
        }
    }
}

/// The steps of a trial: numbers of parcels.
#[derive(Debug)]
struct Steps {
    first: Range<u32>,
    together: Range<u32>,
    alone: Range<u32>,
    looks: Vec<Range<u32>>,
}

impl Steps {
    fn of(shares: &Shares) -> Option<Steps> {
        let [first, together, alone, looks @ .., _rest] = shares.steps() else { return None };
        Some(Steps { first: first.clone(), together: together.clone(), alone: alone.clone(), looks: looks.to_vec() })
    }
}

fn nbytes(shares: &Shares, numbers: &Range<u32>) -> u64 {
    let parcels = &shares.parcels()[numbers.start as usize..numbers.end as usize];
    parcels.iter().map(|parcel| parcel.end - parcel.start).sum()
}

/// Some parcels, and how much longer a read of one takes.
fn slow_parcels(shares: &Shares, numbers: &Range<u32>, milliseconds: u64) -> Vec<(Parcel, Duration)> {
    let parcels = &shares.parcels()[numbers.start as usize..numbers.end as usize];
    parcels.iter().map(|parcel| (*parcel, Duration::from_millis(milliseconds))).collect()
}

#[test]
fn ranks_go_on_in_the_way_that_was_quicker() {
    let model = Model::new(&transformer(), &mut Random(6));
    for (kind, lists) in [
        ("tp", (0..4).map(|rank| sharded(&model.checkpoint, rank, 4)).collect::<Vec<_>>()),
        ("dp", (0..4).map(|_| Want::all(&model.checkpoint)).collect()),
    ] {
        let shares = || {
            let wants = RankWants { lists: &lists, of_rank: &[0, 1, 2, 3] };
            Shares::with_trial(&model.checkpoint, wants, 400_000).unwrap()
        };
        let both = Steps::of(&shares()).unwrap();
        let slow_ones = [(true, both.alone.clone()), (false, both.together.clone())];
        for (exchanged, slow) in slow_ones {
            let slow = slow_parcels(&shares(), &slow, 1000);
            let options = Options { cache: Cache::Bypass, ..Options::default() };
            let reports = model.load_as(shares(), &lists, &options, &slow);
            let reports: Vec<Report> = reports.into_iter().map(|r| r.unwrap()).collect();
            let mut total = [0; 4];
            for report in &reports {
                let exchange = report.exchange.unwrap();
                assert_eq!(exchange.exchanged, exchanged, "{kind}: {:?}", exchange.tried);
                let read = bytes_read(report);
                let useful = read - report.unwanted.slack - report.unwanted.gap;
                let bytes = [exchange.sent, exchange.received, useful, report.nbytes];
                total.iter_mut().zip(bytes).for_each(|(sum, bytes)| *sum += bytes);
            }
            let [sent, received, useful, wanted] = total;
            let [first, together, alone] = [&both.first, &both.together, &both.alone].map(|of| nbytes(&shares(), of));
            assert_eq!(sent, received, "{kind}");
            match exchanged {
                true => assert!(
                    useful <= model.checkpoint.nbytes() + 3 * (first + alone),
                    "{kind}: {useful} of {} {both:?}",
                    model.checkpoint.nbytes()
                ),
                false => assert!(received <= 3 * together, "{kind}: {received}"),
            }
            if kind == "dp" {
                assert_eq!(received + useful, wanted);
                assert_eq!(received, 3 * if exchanged { model.checkpoint.nbytes() - first - alone } else { together });
            }
        }
    }
}

/// What replicas do whose storage becomes slower in the stretch that ends with look number `look`. Exchange took 0.6 s in the trial.
fn slower_later(model: &Model, look: usize) -> (Shares, Vec<Report>) {
    let lists: Vec<_> = (0..4).map(|_| Want::all(&model.checkpoint)).collect();
    let wants = RankWants { lists: &lists, of_rank: &[0, 1, 2, 3] };
    let shares = Shares::with_trial(&model.checkpoint, wants, 100_000).unwrap();
    let both = Steps::of(&shares).unwrap();
    let mut slow = slow_parcels(&shares, &both.together, 600);
    if let Some(parcels) = both.looks.get(look) {
        slow.extend(slow_parcels(&shares, parcels, 400 << look));
    }
    let options = Options { cache: Cache::Bypass, ..Options::default() };
    let reports = model.load_as(shares.clone(), &lists, &options, &slow);
    (shares, reports.into_iter().map(|report| report.unwrap()).collect())
}

#[test]
fn ranks_that_read_for_themselves_exchange_the_rest_once_that_is_slower_than_exchange_was() {
    let model = Model::new(&transformer(), &mut Random(11));
    for look in 0..=3 {
        // On a busy machine other steps may be as slow.
        let as_meant = |reports: &[Report]| reports[0].exchange.unwrap().exchanged == (look < 3);
        let mut found = (0..3).map(|_| slower_later(&model, look));
        let (shares, reports) = found.find(|(_, reports)| as_meant(reports)).expect("three loads went the other way");
        let both = Steps::of(&shares).unwrap();
        assert_eq!(both.looks.len(), 3);
        let (mut received, mut useful) = (0, 0);
        for report in &reports {
            let exchange = report.exchange.unwrap();
            let [alone, together] = exchange.tried.unwrap();
            assert!(alone < together, "{exchange:?}");
            let later = exchange.later.unwrap();
            assert_eq!((exchange.exchanged, later > together), (look < 3, look < 3), "look {look}: {exchange:?}");
            received += exchange.received;
            useful += bytes_read(report);
            useful -= report.unwanted.slack + report.unwanted.gap;
        }
        // What each rank has read for itself before it turned to exchange, and what of the rest one has read for all.
        let [first, together, alone] = [&both.first, &both.together, &both.alone].map(|of| nbytes(&shares, of));
        let looked: u64 = both.looks[..(look + 1).min(3)].iter().map(|look| nbytes(&shares, look)).sum();
        let exchanged = model.checkpoint.nbytes() - first - alone - looked;
        assert_eq!(received, 3 * if look < 3 { exchanged } else { together }, "look {look}");
        assert_eq!(received + useful, 4 * model.checkpoint.nbytes(), "look {look}");
    }
}

/// Ranks of a trial: two want everything, one nothing, one what is tried first.
fn unequal(model: &Model) -> Vec<Vec<Want>> {
    vec![Want::all(&model.checkpoint), Vec::new(), Want::all(&model.checkpoint), vec![Want::whole(0)]]
}

fn tried(model: &Model, lists: &[Vec<Want>]) -> Shares {
    let of_rank: Vec<u32> = (0..lists.len() as u32).collect();
    let shares = Shares::with_trial(&model.checkpoint, RankWants { lists, of_rank: &of_rank }, 300_000).unwrap();
    assert!(Steps::of(&shares).is_some());
    shares
}

#[test]
fn ranks_that_want_nothing_of_what_is_tried_say_so_at_once() {
    let model = Model::new(&transformer(), &mut Random(7));
    let lists = unequal(&model);
    for _ in 0..20 {
        for report in model.load_as(tried(&model, &lists), &lists, &Options::default(), &[]) {
            assert!(report.unwrap().exchange.unwrap().tried.is_some());
        }
    }
}

#[test]
fn a_failure_in_the_trial_reaches_ranks_that_have_nothing_left_to_do() {
    let model = Model::new(&transformer(), &mut Random(8));
    let lists = unequal(&model);
    let parcels = tried(&model, &lists);
    // The last byte of each step, and what follows, are gone.
    let both = Steps::of(&parcels).unwrap();
    let path = model.checkpoint.files()[0].location.as_path().to_path_buf();
    let whole = std::fs::read(&path).unwrap();
    assert!(!both.looks.is_empty());
    let looks = both.looks.iter().map(|look| look.end);
    for last in [both.first.end, both.together.end, both.alone.end].into_iter().chain(looks) {
        let parcel = parcels.parcels()[last as usize - 1];
        assert_eq!(parcel.file, 0);
        std::fs::write(&path, &whole[..parcel.end as usize - 1]).unwrap();
        let begun = Instant::now();
        for outcome in model.load_as(tried(&model, &lists), &lists, &Options::default(), &[]) {
            let error = outcome.map(drop).unwrap_err();
            assert!(error.to_string().contains("model-1"), "{error}");
        }
        assert!(begun.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn a_rank_that_waits_for_one_that_is_there_and_takes_nothing_says_so() {
    // More than the buffers of a connection.
    let model = Model::new(&[("a".into(), vec![4096, 4096]), ("b".into(), vec![64])], &mut Random(12));
    let lists = [Want::all(&model.checkpoint), Want::all(&model.checkpoint)];
    let shares = Arc::new(Shares::new(&model.checkpoint, RankWants { lists: &lists, of_rank: &[0, 1] }).unwrap());
    let seats = [seat(0), seat(1)];
    let addresses: Vec<_> = seats.iter().map(|seat| Some(seat.address().unwrap())).collect();
    let load = |rank: u32, seat: Seat, waits: &dyn Fn()| {
        let mesh = seat.join(&addresses, [7; 16], Duration::from_secs(20), || true)?;
        waits();
        let request = Request {
            checkpoint: model.checkpoint.clone(),
            wants: lists[rank as usize].clone(),
            layout: None,
            device: Where::Cpu,
            memory: Memory::Ours,
            options: Options { stall_timeout: Duration::from_secs(2), ..Options::default() },
            stream: false,
        };
        Load::start_in_group(request, (shares.clone(), mesh), || true)?.wait(None).map(drop)
    };
    let [zero, one] = seats;
    let over = std::sync::Barrier::new(2);
    let (waits, comes_late) = std::thread::scope(|scope| {
        let one = scope.spawn(|| load(1, one, &|| _ = over.wait()));
        let zero = load(0, zero, &|| ()).unwrap_err();
        over.wait();
        (zero, one.join().unwrap().unwrap_err())
    });
    assert_eq!((waits.kind(), waits.path().is_some()), (ErrorKind::Timeout, true), "{waits}");
    assert!(waits.to_string().contains("another rank does not take what this one has read for it"), "{waits}");
    assert_eq!((comes_late.kind(), comes_late.peer().map(|peer| peer.0)), (ErrorKind::Peer, Some(0)), "{comes_late}");
}

#[test]
fn a_rank_that_is_done_hears_of_a_later_failure() {
    let model = Model::new(&transformer(), &mut Random(4));
    let path = model.checkpoint.files()[1].location.as_path().to_path_buf();
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 100_000]).unwrap();
    let of_file = |file: usize| {
        let tensors = model.checkpoint.files()[file].tensors.clone();
        tensors.map(Want::whole).collect::<Vec<Want>>()
    };
    // One wants nothing at all, one only what is whole, and two share what is not.
    let lists = [Vec::new(), of_file(0), of_file(1), Want::all(&model.checkpoint)];
    let begun = Instant::now();
    for outcome in model.load(&lists, &Options::default()) {
        let error = outcome.map(drop).unwrap_err();
        assert!(error.to_string().contains("model-2"), "{error}");
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn the_error_of_one_rank_reaches_all_in_time() {
    let mut random = Random(3);
    let model = Model::new(&transformer(), &mut random);
    let lists: Vec<_> = (0..3).map(|_| Want::all(&model.checkpoint)).collect();
    let path = model.checkpoint.files()[1].location.as_path().to_path_buf();
    // Its header is as before, and its end is gone.
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() - 100_000]).unwrap();
    let begun = Instant::now();
    for outcome in model.load(&lists, &Options::default()) {
        let error = outcome.map(drop).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error.kind(), ErrorKind::Peer | ErrorKind::Truncated | ErrorKind::Changed), "{error:?}");
        assert!(text.contains("model-2"), "{text}");
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
}
