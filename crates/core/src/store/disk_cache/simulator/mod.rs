//! A seeded world for the blocks of a disk cache, in virtual time: 1 to 4 processes, each with a `CacheFlow`; engines that read
//! in file order or not, with places or without; a server that answers late, slowly, or with an error; a disk whose claims
//! vanish with their holders; reads from the disk that fail; writers that are slow, stuck, or have no room; a disk that
//! becomes full, a cache that is read-only; processes that are killed, stopped and cancelled at any step. Bytes go through
//! real memory. Of processes on one slow link, which carries all their requests by turns, the bytes that the server sends are
//! counted. After every call the carrier (`carrier.rs`) checks what the flow has said, against what it knows itself.
//!
//! It also shows that it would notice mistakes: every seeded [`CacheMistake`] must be caught.

use super::flow::mutated::CacheMistake;
use case::{Case, Incident, Writing, MS};
use std::ops::Range;
use world::{Tally, World};

mod carrier;
mod case;
mod disk;
mod world;

/// Seeds of a run that asks for no other number.
const SEEDS: u64 = 1000;

/// `PENSTOCK_SEEDS` asks for more.
fn seeds() -> Range<u64> {
    let Ok(given) = std::env::var("PENSTOCK_SEEDS") else { return 0..SEEDS };
    let (first, past) = given.split_once("..").unwrap_or(("0", &given));
    let number = |text: &str| text.parse().expect("PENSTOCK_SEEDS is a number, or two with .. between them");
    number(first)..number(past)
}

/// Runs the loads of a seed. An `Err` says what is wrong with them.
fn judge(seed: u64) -> Result<Tally, String> {
    World::new(Case::new(seed)).run().map(|(tally, _)| tally)
}

/// A load whose writes never end, beside one that writes nothing: each read ends at the same time.
fn judge_writes(seed: u64) -> Result<(), String> {
    let ends = |writing| World::new(Case::of_one(seed, writing)).run().map(|(_, reads)| reads);
    let (never, nothing) = (ends(Writing::Sticks(0))?, ends(Writing::Drops)?);
    match never.iter().zip(&nothing).position(|(a, b)| a != b) {
        Some(read) => Err(format!("read {read} waits for a write: {:?}, not {:?}", never[read], nothing[read])),
        None => Ok(()),
    }
}

/// Processes that start together on one slow link, with one that is lost or without: what the server is asked for, and their time.
fn judge_slow_link(seed: u64) -> Result<(), String> {
    let incidents = [None, Some(Incident::Stopped(None)), Some(Incident::Killed)];
    let lost = incidents[seed as usize % 3];
    let case = Case::of_slow_link(seed, lost);
    let (blocks, rate) = (case.blocks() as u64, case.rate);
    let (tally, _) = World::new(case).run()?;
    if tally.asked > blocks + tally.lost {
        return Err(format!("{} blocks are asked for, {} of {blocks} were lost; {lost:?}", tally.asked, tally.lost));
    }
    // Its blocks come once more, after a second in which others did not come either; a few come first.
    let most = (blocks + tally.lost) * rate + if tally.lost > 0 { 4000 * MS + 8 * rate } else { 1000 * MS };
    if tally.ended > most {
        return Err(format!("it takes {} ms, not {}; {lost:?}", tally.ended / MS, most / MS));
    }
    Ok(())
}

#[test]
fn processes_on_a_slow_link_ask_for_each_block_once() {
    for seed in seeds().step_by(16) {
        judge_slow_link(seed).unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
    }
}

#[test]
fn every_read_ends_once_with_its_bytes_or_the_error_of_its_block_whatever_happens() {
    let mut all = Tally::default();
    for seed in seeds() {
        let tally = judge(seed).unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
        all.add(tally);
    }
    println!("{all:?}");
    // If the world were too kind or too cruel, the test would mean nothing.
    let count = seeds().end - seeds().start;
    assert!(all.undisturbed > count / 20 && all.undisturbed < count / 2, "{all:?}");
    assert!(all.failed > all.copied / 50 && all.failed < all.copied, "{all:?}");
    assert!(all.taken_over > count / 4 && all.fetched > count && all.written > count, "{all:?}");
}

#[test]
fn no_read_waits_for_a_write() {
    for seed in seeds().step_by(4) {
        judge_writes(seed).unwrap_or_else(|fault| panic!("seed {seed}: {fault}"));
    }
}

#[test]
fn every_mistake_of_the_flow_is_caught() {
    let mut missed = Vec::new();
    for &mistake in CacheMistake::ALL {
        CacheMistake::commit(Some(mistake));
        let caught = (0..SEEDS).find_map(|seed| Some((seed, judge(seed).err()?)));
        let caught = caught.or_else(|| (0..SEEDS / 10).find_map(|seed| Some((seed, judge_slow_link(seed).err()?))));
        CacheMistake::commit(None);
        match caught {
            Some((seed, fault)) => println!("{mistake:?}: seed {seed}: {fault}"),
            None => missed.push(mistake),
        }
    }
    assert!(missed.is_empty(), "not caught in {SEEDS} seeds: {missed:?}");
    assert!(CacheMistake::ALL.len() >= 15);
}
