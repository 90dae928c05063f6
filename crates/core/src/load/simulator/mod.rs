//! A seeded world for ranks that load together: a clock that jumps; storage and network cards with rates; connections that keep
//! their order and hold back; words that come late; ranks that are killed, stopped and resumed, nodes that lose their power,
//! reads that fail, storage that hangs; ranks of one node that lend each other slabs. Plan (`Shares`, `Schedule`), engine, watch
//! and loans are those of every load. Storage, network and the threads that serve them are models, and no bytes move: a case
//! shows without them that each gets to its place, and each slab knows its readers.
//!
//! It also shows that it would notice mistakes: of the engine ([`Mutant::OF_RANKS`]), of the watch ([`Lapse`]), of the loans
//! ([`BadLoan`]), and of a plan ([`Misplan`]).

use crate::engine::mutated::Mutant;
use crate::error::ErrorKind;
use crate::peers::loans::mutated::BadLoan;
use crate::peers::watch::mutated::Lapse;
use case::{Case, Misplan, Model, Nodes, Wanted};
use random::Rng;
use std::collections::BTreeMap;
use std::ops::Range;
use world::{Ended, Incident, LinkTraits, Machines, Setting, Time, World, KERNEL, MS, PEER_TIMEOUT, SECOND};

mod case;
mod random;
mod replicas;
mod world;

/// Seeds of a run that asks for no other number.
const SEEDS: u64 = 600;

/// `PENSTOCK_SEEDS` asks for more.
fn seeds() -> Range<u64> {
    let Ok(given) = std::env::var("PENSTOCK_SEEDS") else { return 0..SEEDS };
    let (first, past) = given.split_once("..").unwrap_or(("0", &given));
    let number = |text: &str| text.parse().expect("PENSTOCK_SEEDS is a number, or two with .. between them");
    number(first)..number(past)
}

/// The mistakes of one run.
#[derive(Debug, Clone, Copy, Default)]
struct Mistakes {
    mutant: Option<Mutant>,
    lapse: Option<Lapse>,
    bad_loan: Option<BadLoan>,
    misplan: Option<Misplan>,
}

/// The load that a seed makes.
#[derive(Debug, Clone, Copy)]
struct Scenario {
    nodes: Nodes,
    wanted: Wanted,
    gpu: bool,
    late_slabs: bool,
    setting: Setting,
    incident: Option<(Time, Incident)>,
    late: Option<(u32, Time)>,
}

impl Scenario {
    fn new(rng: &mut Rng, mistakes: Mistakes) -> Scenario {
        let ranks = 2 + rng.below(7) as u32;
        let nodes = 1 + rng.below(u64::from(ranks)) as u32;
        let wanted = Wanted::ALL[rng.below(5) as usize];
        let gpu = rng.one_in(2);
        let slow = rng.one_in(4);
        let machines = Machines {
            // 16 MB, by each rank at most: up to 30 s.
            storage: rng.between(if slow { 2e6 } else { 20e6 }, 10e9),
            node: rng.between(20e6, 10e9),
            network: rng.between(50e6, 50e9),
            local: rng.between(200e6, 20e9),
            device: rng.between(200e6, 50e9),
            latency: 10_000 + rng.below(MS),
            first_byte: rng.below(5 * MS),
            lost: if rng.one_in(3) { 600 * MS } else { 0 },
        };
        let setting = Setting {
            machines,
            slabs: 2 + rng.below(7) as usize,
            depth: 1 + rng.below(8) as usize,
            mutant: mistakes.mutant,
            lapse: mistakes.lapse,
            bad_loan: mistakes.bad_loan,
            ..Setting::of(machines)
        };
        let rank = rng.below(u64::from(ranks)) as u32;
        // Before, while and after most loads.
        let at = rng.between(1e6, 12e9) as Time;
        let incident = match rng.below(18) {
            0 | 1 => Some(Incident::Killed(rank)),
            2 => Some(Incident::Stopped(rank, None)),
            3 => Some(Incident::Stopped(rank, Some(6 * SECOND + rng.below(10 * SECOND)))),
            4 => Some(Incident::Stopped(rank, Some(rng.below(3 * SECOND)))),
            5 | 6 => Some(Incident::NodeLost(rng.below(u64::from(nodes)) as u32)),
            7 | 8 => Some(Incident::ReadFails(rank)),
            9 => Some(Incident::StorageHangs(rank)),
            10 => Some(Incident::AllSleep(6 * SECOND + rng.below(30 * SECOND))),
            11 => Some(Incident::AllStorageHangs),
            _ => None,
        };
        let late = rng.one_in(6).then(|| (rng.below(u64::from(ranks)) as u32, rng.below(20 * SECOND)));
        let late = late.filter(|_| incident.is_none());
        let late_slabs = rng.one_in(3);
        // All ranks, most of them, or none.
        let sharing = match rng.below(3) {
            0 => 0,
            1 => rng.next() | rng.next(),
            _ => u64::MAX,
        };
        let links = LinkTraits {
            delay: rng.between(1e3, 1e9) as Time,
            unreachable: rng.one_in(4).then(|| 1 + rng.below(4)),
            unmapped: rng.one_in(4).then(|| (rng.below(u64::from(ranks)) as u32, 1 + rng.below(8))),
            unregistered: rng.one_in(4).then(|| rng.below(u64::from(ranks)) as u32),
        };
        // A rank whose slabs all hold reads that hang takes nothing. With short buffers another rank may stall before it.
        let hangs = matches!(incident, Some(Incident::StorageHangs(_)));
        let kernel = if rng.one_in(3) || hangs { KERNEL } else { 1 + rng.below(1 << 20) };
        let setting = Setting { links, kernel, uneven: rng.one_in(3), ..setting };
        let nodes = Nodes { ranks, nodes, sharing };
        Scenario { nodes, wanted, gpu, late_slabs, setting, incident: incident.map(|i| (at, i)), late }
    }
}

/// The end of a run: all ranks ended well, or all with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    AllWell,
    AllFailed,
}

/// Runs the load that a seed makes. An `Err` says what is wrong with it.
fn judge(model: &Model, seed: u64, mistakes: Mistakes) -> Result<Option<Outcome>, String> {
    let mut rng = Rng(seed);
    let scenario = Scenario::new(&mut rng, mistakes);
    let Scenario { nodes, wanted, setting, incident, late, .. } = scenario;
    let mut case = Case::new(model, wanted, nodes, scenario.gpu, scenario.late_slabs);
    if let Some(misplan) = mistakes.misplan {
        if !case.misplan(misplan, &mut rng) {
            return Ok(None);
        }
    }
    case.check()?;
    let mut world = World::new(&case, setting, rng.next());
    if let Some((at, incident)) = incident {
        world.let_happen(at, incident);
    }
    if let Some((rank, at)) = late {
        world.begins_late(rank, at);
    }
    let ended = world.run(400 * SECOND).map_err(|fault| format!("{scenario:?}: {fault}"))?;
    check(&world, &scenario, &ended).map(Some).map_err(|fault| format!("{scenario:?}: {fault}"))
}

fn check(world: &World<'_>, scenario: &Scenario, ended: &[Option<Ended>]) -> Result<Outcome, String> {
    if let Some(rank) = world.keeps_slabs() {
        return Err(format!("rank {rank} has ended and keeps a slab"));
    }
    if let Some(rank) = world.keeps_loans() {
        return Err(format!("rank {rank} has ended and keeps a slab of another one"));
    }
    let errors = ended.iter().flatten().filter(|ended| ended.error.is_some()).count();
    let harmless = match scenario.incident {
        None | Some((_, Incident::AllSleep(_))) => true,
        Some((_, Incident::Stopped(_, Some(pause)))) => pause < PEER_TIMEOUT - SECOND,
        _ => false,
    };
    if errors == 0 && ended.iter().all(Option::is_some) {
        if world.lends() {
            return Err("all ended well, and a slab is still lent or retired".to_owned());
        }
        return all_is_there(world, ended).map(|()| Outcome::AllWell);
    }
    if harmless {
        let first = ended.iter().flatten().find_map(|ended| ended.error.as_ref());
        return Err(format!("{errors} ranks fail for no reason: {first:?}"));
    }
    let Some((at, incident)) = scenario.incident else { return Err("a rank never ends".to_owned()) };
    // Words that are lost are said again later.
    let lost = scenario.setting.machines.lost;
    let (culprits, soon) = match incident {
        Incident::Killed(rank) => (vec![rank], SECOND + 2 * lost),
        Incident::Stopped(rank, _) => (vec![rank], PEER_TIMEOUT + SECOND + 2 * lost),
        Incident::NodeLost(node) => {
            let there = (0..scenario.nodes.ranks).filter(|rank| world.node_of(*rank) == node);
            (there.collect(), PEER_TIMEOUT + SECOND + 2 * lost)
        }
        // When its next read ends, and when it has hung for the stall timeout and a drain.
        Incident::ReadFails(rank) => (vec![rank], 40 * SECOND),
        Incident::StorageHangs(rank) => (vec![rank], 160 * SECOND),
        Incident::AllStorageHangs => return none_waits_for_ever(ended, at),
        Incident::AllSleep(_) => return Err("ranks that slept together fail".to_owned()),
    };
    let mut survivors = 0;
    for (rank, ended) in (0..).zip(ended) {
        if culprits.contains(&rank) {
            if let (Some(ended), Incident::Stopped(..)) = (ended, incident) {
                // It finds itself declared dead.
                let kind = ended.error.as_ref().map(crate::error::Error::kind);
                if kind.is_some_and(|kind| kind != ErrorKind::Peer) {
                    return Err(format!("rank {rank}, resumed, ends with {:?}", ended.error));
                }
            }
            continue;
        }
        survivors += 1;
        let Some(ended) = ended else { return Err(format!("rank {rank} has no end")) };
        let Some(error) = &ended.error else {
            // The culprit had everything, and had said so: nobody needs it any more.
            let complete = culprits.iter().all(|culprit| world.complete_before[*culprit as usize]);
            if ended.at <= at || (complete && ended.at <= at + soon) {
                continue;
            }
            return Err(format!("rank {rank} ended well after {incident:?}"));
        };
        let named = error.peer().map(|peer| peer.0);
        if error.kind() != ErrorKind::Peer || !named.is_some_and(|named| culprits.contains(&named)) {
            return Err(format!("rank {rank} blames {named:?} for {incident:?}: {error}"));
        }
        if matches!(incident, Incident::ReadFails(_)) && !error.message().contains("simulated") {
            return Err(format!("rank {rank} hears nothing of the cause: {error}"));
        }
        if ended.at > at + soon {
            return Err(format!("rank {rank} ends {} ms after {incident:?}", (ended.at - at) / MS));
        }
    }
    if matches!(incident, Incident::ReadFails(_) | Incident::StorageHangs(_)) {
        let [culprit] = culprits[..] else { return Err("no culprit".to_owned()) };
        let error = ended[culprit as usize].as_ref().and_then(|ended| ended.error.as_ref());
        let expected = if matches!(incident, Incident::ReadFails(_)) { ErrorKind::Io } else { ErrorKind::Timeout };
        if error.map(crate::error::Error::kind) != Some(expected) {
            return Err(format!("rank {culprit} ends with {error:?} after {incident:?}"));
        }
    }
    if survivors == 0 {
        return Ok(Outcome::AllFailed);
    }
    Ok(if errors == 0 { Outcome::AllWell } else { Outcome::AllFailed })
}

/// Storage that hangs for all ends the load of each, and nobody's waiting keeps another one waiting.
fn none_waits_for_ever(ended: &[Option<Ended>], at: Time) -> Result<Outcome, String> {
    for (rank, ended) in (0..).zip(ended) {
        let kind = ended.as_ref().and_then(|ended| ended.error.as_ref()).map(crate::error::Error::kind);
        let soon = ended.as_ref().is_some_and(|ended| ended.at <= at + 130 * SECOND);
        if !matches!(kind, Some(ErrorKind::Timeout | ErrorKind::Peer)) || !soon {
            return Err(format!("rank {rank} ends with {ended:?} where the storage hangs"));
        }
    }
    Ok(Outcome::AllFailed)
}

/// After a load that went well: every wanted byte has arrived, once, and each shared one was read once.
fn all_is_there(world: &World<'_>, ended: &[Option<Ended>]) -> Result<(), String> {
    let case = world.case;
    for (rank, ended) in (0..).zip(ended) {
        let wanted: u64 = case.layout(rank).places.iter().map(|place| place.nbytes).sum();
        let arrived = ended.as_ref().map_or(0, |ended| ended.arrived);
        if arrived != wanted {
            return Err(format!("rank {rank} has {arrived} of {wanted} bytes"));
        }
    }
    for (number, parcel) in (0..).zip(case.shares.parcels()) {
        if world.parcels_read.get(&number).map(Vec::as_slice) != Some(&[parcel.reader]) {
            return Err(format!("parcel {number} was read by {:?}", world.parcels_read.get(&number)));
        }
        for &rank in case.shares.audience(parcel) {
            let wants = case.shares.parts(case.checkpoint, rank, parcel).next().is_some();
            let comes = world.received.contains(&(number, rank));
            if comes != (wants && rank != parcel.reader) {
                return Err(format!("parcel {number} of rank {}: to rank {rank} it came: {comes}", parcel.reader));
            }
        }
    }
    Ok(())
}

#[test]
fn ranks_end_together_whatever_happens_and_every_byte_comes_once() {
    let (model, mut found) = (Model::transformer(), BTreeMap::new());
    for seed in seeds() {
        match judge(&model, seed, Mistakes::default()) {
            Ok(outcome) => *found.entry(outcome).or_insert(0u64) += 1,
            Err(fault) => panic!("seed {seed}: {fault}"),
        }
    }
    println!("{found:?}");
    // If the world were too kind or too cruel, the test would mean nothing.
    let well = found.get(&Some(Outcome::AllWell)).copied().unwrap_or(0);
    let all = seeds().end - seeds().start;
    assert!(well > all / 4 && well < all * 4 / 5, "{well} of {all} loads ended well");
}

/// The first seed that shows a mistake.
fn caught(model: &Model, mistakes: Mistakes) -> Option<(u64, String)> {
    (0..SEEDS).find_map(|seed| Some((seed, judge(model, seed, mistakes).err()?)))
}

#[test]
fn mistakes_of_the_engine_of_the_watch_of_loans_and_of_the_plan_are_caught() {
    let model = Model::transformer();
    let mut missed: Vec<String> = Vec::new();
    let mut look = |name: String, mistakes| match caught(&model, mistakes) {
        Some((seed, fault)) => println!("{name}: seed {seed}: {fault}"),
        None => missed.push(name),
    };
    for &mutant in Mutant::OF_RANKS {
        look(format!("{mutant:?}"), Mistakes { mutant: Some(mutant), ..Mistakes::default() });
    }
    for &lapse in Lapse::ALL {
        look(format!("{lapse:?}"), Mistakes { lapse: Some(lapse), ..Mistakes::default() });
    }
    for &bad_loan in BadLoan::ALL {
        look(format!("{bad_loan:?}"), Mistakes { bad_loan: Some(bad_loan), ..Mistakes::default() });
    }
    for misplan in Misplan::ALL {
        look(format!("{misplan:?}"), Mistakes { misplan: Some(misplan), ..Mistakes::default() });
    }
    assert!(missed.is_empty(), "not caught in {SEEDS} seeds: {missed:?}");
}
