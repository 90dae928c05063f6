//! Many nodes. Replicas of a large checkpoint by a coarser model of the same shares: each parcel is read, leaves its reader for
//! every other node, and comes there, through pipes; engines, slabs and back-pressure are left out. With few nodes it is compared
//! with the world, which has them: they agree where the storage is what bounds a load, and it is the faster one, by up to a
//! quarter, where the network is. A thousand nodes with engines and watches, each with a tensor of its own, show who notices the
//! loss of one.

use super::case::{Case, Model, Nodes, Wanted};
use super::random::Pipe;
use super::world::{Incident, Machines, Setting, Time, World, MS, PEER_TIMEOUT, SECOND};
use crate::error::ErrorKind;
use crate::plan::shares::{RankWants, Shares};
use crate::plan::want::Want;

const MIB: u64 = 1 << 20;

/// Storage, and nodes with one rank each.
fn machines(storage: f64, network: f64) -> Machines {
    Machines { storage, node: 20e9, network, local: 50e9, device: 50e9, latency: 50_000, first_byte: MS, lost: 0 }
}

/// A matrix of so many MiB.
fn matrix(mib: u64) -> Model {
    Model::new(&[vec![vec![mib, MIB / 2]]])
}

/// How long replicas on so many nodes take, and how many bytes they read of the storage.
fn replicas(model: &Model, machines: Machines, nodes: u32) -> (f64, u64) {
    let checkpoint = &model.checkpoint;
    let lists = [Want::all(checkpoint)];
    let shares = Shares::new(checkpoint, RankWants { lists: &lists, of_rank: &vec![0; nodes as usize] }).unwrap();
    let mut storage = Pipe::new(machines.storage);
    let pipes = |rate: f64| vec![Pipe::new(rate); nodes as usize];
    let (mut ways, mut out, mut into) = (pipes(machines.node), pipes(machines.network), pipes(machines.network));
    // In the order in which the storage serves readers that read at the same time: the first of each, then the second.
    let mut of_reader: Vec<Vec<u64>> = vec![Vec::new(); nodes as usize];
    for parcel in shares.parcels() {
        of_reader[parcel.reader as usize].push(parcel.end - parcel.start);
    }
    if nodes == 1 {
        // What one rank wants is no parcel.
        let bytes = checkpoint.nbytes();
        let end = storage.carry(0, bytes).max(ways[0].carry(0, bytes)) + machines.first_byte;
        return (end as f64 / 1e9, bytes);
    }
    let (mut end, mut read) = (0, 0);
    for round in 0..of_reader.iter().map(Vec::len).max().unwrap_or(0) {
        for (reader, parcels) in of_reader.iter().enumerate() {
            let Some(&bytes) = parcels.get(round) else { continue };
            read += bytes;
            let here = storage.carry(0, bytes).max(ways[reader].carry(0, bytes)) + machines.first_byte;
            end = end.max(here);
            for to in (1..nodes as usize).map(|step| (reader + step) % nodes as usize) {
                let left = out[reader].carry(here, bytes);
                end = end.max(into[to].carry(left, bytes).max(left) + machines.latency);
            }
        }
    }
    (end as f64 / 1e9, read)
}

/// The same by the world.
fn simulated(model: &Model, machines: Machines, nodes: u32) -> (f64, u64) {
    let case = Case::new(model, Wanted::Replicas, Nodes::apart(nodes), false, false);
    let setting = Setting { slabs: 64, depth: 16, ..Setting::of(machines) };
    let mut world = World::new(&case, setting, 1);
    let ended = world.run(1000 * SECOND).unwrap();
    let ends = ended.iter().flatten();
    assert!(ends.clone().all(|ended| ended.error.is_none()) && ended.iter().all(Option::is_some));
    (ends.map(|ended| ended.at).max().unwrap() as f64 / 1e9, world.bytes_read.iter().sum())
}

#[test]
fn the_coarse_model_takes_as_long_as_the_ranks_themselves() {
    let model = matrix(256);
    for (storage, network) in [(1e9, 25e9), (100e6, 10e9), (10e9, 2e9)] {
        for nodes in [2, 4, 8, 24] {
            let machines = machines(storage, network);
            let ((coarse, _), (ranks, read)) = (replicas(&model, machines, nodes), simulated(&model, machines, nodes));
            println!("{nodes} nodes, {storage:.0e} and {network:.0e} B/s: {coarse:.3} s, {ranks:.3} s with engines");
            let apart = (coarse / ranks - 1.0).abs();
            assert!(apart < if storage < 2e9 { 0.03 } else { 0.3 }, "{nodes} nodes: {coarse:.3} s and {ranks:.3} s");
            // The header is no whole page: both ends of a parcel share a page with a neighbour.
            assert!(read <= 256 * MIB + 2 * 4096 * u64::from(nodes) * 300, "{read}");
        }
    }
}

/// 16 GiB from storage of 10 GB/s, and network cards of 25 GB/s.
#[test]
fn a_thousand_nodes_take_as_long_as_one_and_read_the_storage_once() {
    let model = matrix(16 << 10);
    let machines = machines(10e9, 25e9);
    let (one, _) = replicas(&model, machines, 1);
    for nodes in [2, 8, 64, 512, 1000] {
        let (seconds, read) = replicas(&model, machines, nodes);
        println!("{nodes} nodes: {seconds:.3} s, {:.3} of one", seconds / one);
        assert!(seconds <= 1.15 * one, "{nodes} nodes take {seconds:.3} s, one {one:.3} s");
        assert_eq!(read, 16 << 30);
    }
}

/// The bound above means something: with slow network cards a thousand nodes take longer.
#[test]
fn slow_network_cards_would_be_seen() {
    let (model, machines) = (matrix(1 << 10), machines(10e9, 2e9));
    let ((one, _), (seconds, _)) = (replicas(&model, machines, 1), replicas(&model, machines, 64));
    assert!(seconds > 4.0 * one, "{seconds} and {one}");
}

/// Many ranks that load for as long as it takes to notice. A node is lost at the beginning, or later.
#[test]
fn a_thousand_ranks_name_the_node_that_is_lost_in_time() {
    for (ranks, at) in [(1000, 2 * SECOND), (100, 50 * MS)] {
        let model = Model::new(&[vec![vec![40, 4096]; ranks as usize]]);
        let case = Case::new(&model, Wanted::Apart, Nodes::apart(ranks), false, false);
        let slow = Machines { storage: 16.4e3 * f64::from(ranks), ..machines(1e9, 25e9) };
        let mut world = World::new(&case, Setting { slabs: 4, depth: 4, ..Setting::of(slow) }, 7);
        world.let_happen(at, Incident::NodeLost(17));
        let ended = world.run(100 * SECOND).unwrap();
        let mut last: Time = 0;
        for (rank, ended) in (0..).zip(&ended).filter(|(rank, _)| *rank != 17u32) {
            let ended = ended.as_ref().unwrap_or_else(|| panic!("rank {rank} has no end"));
            let error = ended.error.as_ref().unwrap_or_else(|| panic!("rank {rank} ended well"));
            assert_eq!((error.kind(), error.peer().map(|peer| peer.0)), (ErrorKind::Peer, Some(17)), "rank {rank}");
            last = last.max(ended.at - at);
        }
        println!("lost after {} ms: the last of {ranks} ranks errs {} ms later", at / MS, last / MS);
        assert!(last <= PEER_TIMEOUT + SECOND, "{} ms", last / MS);
    }
}
