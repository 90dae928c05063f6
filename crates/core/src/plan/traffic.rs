//! Traffic: the bytes and reads that shares mean for each rank and each node, and what each rank would read alone.
//!
//! No file is opened. Reads are counted as those of a load past the page cache: of files of this machine whole pages, and holes
//! of up to 16 KiB; of objects of a store as it declares.

use super::layout::{Layout, Target};
use super::packed;
use super::planned::{declared_extent, declared_gap};
use super::schedule::{FileTraits, Limits, RankShares, Schedule};
use super::shares::{RankWants, Shares};
use super::want::{Runs, Want};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Extent, Lane};
use crate::format::{Checkpoint, ShardFile};
use crate::options::{Options, Order, Scope, PAGE};
use crate::way::Way;
use std::collections::BTreeMap;

/// Reads from storage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StorageReads {
    /// Bytes that they bring.
    pub bytes: u64,
    /// How many there are.
    pub count: u64,
    /// Bytes among them that the reader does not want.
    pub unwanted: u64,
}

/// Bytes and reads of one rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OfRank {
    /// Bytes that it wants.
    pub wanted: u64,
    /// Bytes that it reads from storage: for itself, and of what it shares.
    pub read: u64,
    /// Reads of these.
    pub reads: u64,
    /// Parcels that it reads for itself and others.
    pub parcels: u64,
    /// Bytes that it sends to other ranks.
    pub sent: u64,
    /// Bytes that other ranks send to it.
    pub received: u64,
    /// Bytes that it reads from storage and that no rank wants. A lower limit where ranks want overlapping parts that differ.
    pub unwanted: u64,
    /// Its reads without the others.
    pub alone: StorageReads,
}

/// Bytes that cross the border of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OfNode {
    /// Bytes that its ranks read from storage.
    pub read: u64,
    /// Bytes that they would read each without the others.
    pub alone: u64,
    /// Bytes that its ranks send to ranks of other nodes.
    pub sent: u64,
    /// Bytes that come from ranks of other nodes.
    pub received: u64,
}

/// See the module's documentation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlannedTraffic {
    /// For each rank.
    pub ranks: Vec<OfRank>,
    /// For each node.
    pub nodes: Vec<OfNode>,
}

/// The bytes that one audience gets: of each list, from each reader.
struct Alike {
    /// (list, one of its ranks).
    lists: Vec<(u32, u32)>,
    /// By reader: bytes of each list.
    of_reader: BTreeMap<u32, Vec<u64>>,
}

impl PlannedTraffic {
    /// The traffic of a load of these ranks. `nodes`: for each rank, the number of its node. `scope`: which of them read for each
    /// other.
    ///
    /// # Errors
    /// The errors of [`Shares::new`] and [`Schedule::check`]. `Invalid` if there is not one node for each rank, or a node has a number
    /// that so few ranks do not need.
    pub fn new(checkpoint: &Checkpoint, wants: RankWants<'_>, nodes: &[u32], scope: Scope) -> Result<PlannedTraffic> {
        if nodes.len() != wants.of_rank.len() {
            let text = format!("nodes of {} ranks, and wants of {}", nodes.len(), wants.of_rank.len());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if let Some(node) = nodes.iter().find(|node| **node as usize >= nodes.len()) {
            let text = format!("node {node} of {} ranks: nodes are counted from 0", nodes.len());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        wants.check()?;
        let packed: Vec<Vec<u8>> = wants.lists.iter().map(|wants| packed::pack(wants)).collect();
        let nobodys = packed::pack(&[]);
        let groups: Vec<Vec<u32>> = match scope {
            Scope::World => vec![(0..wants.of_rank.len() as u32).collect()],
            Scope::Node => (0..nodes.len() as u32)
                .map(|here| (0..).zip(nodes).filter(|(_, node)| **node == here).map(|(rank, _)| rank).collect())
                .collect(),
        };
        let mut found = PlannedTraffic {
            ranks: vec![OfRank::default(); wants.of_rank.len()],
            nodes: vec![OfNode::default(); nodes.iter().max().map_or(0, |last| *last as usize + 1)],
        };
        // What is wanted, and what one rank would read: the same for all ranks that have a list.
        let mut of_lists: Vec<Option<(u64, StorageReads)>> = vec![None; wants.lists.len()];
        let files = traits(checkpoint)?;
        for members in groups.iter().filter(|members| !members.is_empty()) {
            // Those that are no members want nothing.
            let mut used: Vec<u32> = members.iter().map(|rank| wants.of_rank[*rank as usize]).collect();
            used.sort_unstable();
            used.dedup();
            let mut lists: Vec<&[u8]> = used.iter().map(|list| &packed[*list as usize][..]).collect();
            lists.push(&nobodys);
            let mut of_rank = vec![used.len() as u32; wants.of_rank.len()];
            for &rank in members {
                of_rank[rank as usize] = used.partition_point(|list| *list < wants.of_rank[rank as usize]) as u32;
            }
            let shares = Shares::new(checkpoint, RankWants { lists: &lists, of_rank: &of_rank })?;
            for (number, list) in (0..).zip(&used) {
                let wants = &wants.lists[*list as usize];
                let of_list: Vec<u32> = members.iter().copied().filter(|r| of_rank[*r as usize] == number).collect();
                let one = (of_list.len() == 1).then_some(of_list[0]);
                let known = &mut of_lists[*list as usize];
                if known.is_none() || one.is_some() {
                    let reading = Counting::new(checkpoint, wants, &files)?;
                    if known.is_none() {
                        let bytes = wants.iter().map(|want| Ok(Runs::of(checkpoint, want)?.nbytes()));
                        *known = Some((bytes.sum::<Result<u64>>()?, reading.reads(None)));
                    }
                    if let Some(rank) = one {
                        // What only this rank wants. What several ranks want is in parcels.
                        let reads = reading.reads(Some(&RankShares::new(&shares, rank)));
                        let rank = &mut found.ranks[rank as usize];
                        rank.read += reads.bytes;
                        rank.reads += reads.count;
                        rank.unwanted += reads.unwanted;
                    }
                }
                let (wanted, alone) = known.unwrap_or_default();
                for &rank in &of_list {
                    found.ranks[rank as usize].wanted = wanted;
                    found.ranks[rank as usize].alone = alone;
                }
            }
            found.add_parcels(checkpoint, &shares, &of_rank, nodes, &files);
        }
        for (rank, node) in found.ranks.iter().zip(nodes) {
            found.nodes[*node as usize].read += rank.read;
            found.nodes[*node as usize].alone += rank.alone.bytes;
        }
        Ok(found)
    }

    /// Adds what is read by one rank for itself and others.
    fn add_parcels(
        &mut self,
        checkpoint: &Checkpoint,
        shares: &Shares,
        of_rank: &[u32],
        nodes: &[u32],
        files: &[FileTraits],
    ) {
        let PlannedTraffic { ranks, nodes: found } = self;
        let mut groups: BTreeMap<u32, Alike> = BTreeMap::new();
        for parcel in shares.parcels() {
            let size = checkpoint.files()[parcel.file as usize].size;
            let reader = &mut ranks[parcel.reader as usize];
            let bytes = match files[parcel.file as usize].way.cold.whole_units {
                true => parcel.end.next_multiple_of(PAGE).min(size) - parcel.start / PAGE * PAGE,
                false => parcel.end - parcel.start,
            };
            reader.read += bytes;
            reader.unwanted += bytes - shares.wanted(checkpoint, parcel);
            reader.reads += 1;
            reader.parcels += 1;
            let group = groups.entry(parcel.audience_number()).or_insert_with(|| {
                let mut lists: Vec<(u32, u32)> = Vec::new();
                for &rank in shares.audience(parcel) {
                    if !lists.iter().any(|(list, _)| *list == of_rank[rank as usize]) {
                        lists.push((of_rank[rank as usize], rank));
                    }
                }
                Alike { lists, of_reader: BTreeMap::new() }
            });
            let of_lists = group.of_reader.entry(parcel.reader).or_insert_with(|| vec![0; group.lists.len()]);
            for (sum, (_, rank)) in of_lists.iter_mut().zip(&group.lists) {
                let parts = shares.parts(checkpoint, *rank, parcel);
                *sum += parts.map(|part| part.dense.end - part.dense.start).sum::<u64>();
            }
        }
        for (audience, group) in groups {
            group.exchange(shares.audience_of(audience), of_rank, nodes, ranks, found);
        }
    }
}

impl Alike {
    /// Adds what its audience sends and receives.
    fn exchange(&self, audience: &[u32], of_rank: &[u32], nodes: &[u32], ranks: &mut [OfRank], found: &mut [OfNode]) {
        let number = |rank: u32| self.lists.iter().position(|(list, _)| *list == of_rank[rank as usize]).unwrap_or(0);
        let node_of = |rank: u32| nodes[rank as usize];
        let mut all = vec![0; self.lists.len()];
        // By node: bytes of each list that it reads, and how many of its ranks have each list.
        let mut of_node: BTreeMap<u32, (Vec<u64>, Vec<u64>)> = BTreeMap::new();
        let none = || (vec![0; self.lists.len()], vec![0; self.lists.len()]);
        let mut members = vec![0; self.lists.len()];
        for &rank in audience {
            members[number(rank)] += 1;
            of_node.entry(node_of(rank)).or_insert_with(none).1[number(rank)] += 1;
        }
        for (reader, bytes) in &self.of_reader {
            let here = &mut of_node.entry(node_of(*reader)).or_insert_with(none).0;
            for (list, bytes) in bytes.iter().enumerate() {
                all[list] += bytes;
                here[list] += bytes;
            }
        }
        for (reader, bytes) in &self.of_reader {
            let here = &of_node[&node_of(*reader)].1;
            for (list, bytes) in bytes.iter().enumerate() {
                let own = u64::from(list == number(*reader));
                ranks[*reader as usize].sent += bytes * (members[list] - own);
                found[node_of(*reader) as usize].sent += bytes * (members[list] - here[list]);
            }
        }
        for &rank in audience {
            let list = number(rank);
            let own = self.of_reader.get(&rank).map_or(0, |bytes| bytes[list]);
            ranks[rank as usize].received += all[list] - own;
            found[node_of(rank) as usize].received += all[list] - of_node[&node_of(rank)].0[list];
        }
    }
}

/// The traits of each file for a load past the page cache. Objects of a store have the lengths that it declares.
fn traits(checkpoint: &Checkpoint) -> Result<Vec<FileTraits>> {
    let (options, storage) = (Options::default(), checkpoint.storage()?);
    let of = |(number, file): (u32, &ShardFile)| {
        if file.location.scheme().is_none() {
            let way = Way { cold: Lane::DIRECT, ..Way::default() };
            return Ok(FileTraits { unit: Some(512), way, ..FileTraits::default() });
        }
        let facts = storage.facts(number)?;
        let lane = facts.lanes.past_cache.unwrap_or(facts.lanes.any);
        let way = Way { cold: lane, warm: lane, parts: facts.lanes.any, ..Way::default() };
        let (unit, extent) = (facts.lanes.unit, declared_extent(&facts, &options));
        Ok(FileTraits { unit, way, extent, gap: declared_gap(&facts, &options), ..FileTraits::default() })
    };
    (0..).zip(checkpoint.files()).map(of).collect()
}

/// The reads of one list of wants, past the page cache.
struct Counting<'a> {
    checkpoint: &'a Checkpoint,
    layout: Layout,
    files: &'a [FileTraits],
    limits: Limits,
}

impl<'a> Counting<'a> {
    fn new(checkpoint: &'a Checkpoint, wants: &[Want], files: &'a [FileTraits]) -> Result<Counting<'a>> {
        let options = Options::default();
        let layout = Layout::new(checkpoint, wants, &Target::Gpu, Order::File)?;
        let limits = Limits {
            extent: options.extent,
            gap: options.least_gap(),
            scatter: None,
            direct_in_place: true,
            window: None,
        };
        Schedule::check(checkpoint, wants, &layout, files, &limits)?;
        Ok(Counting { checkpoint, layout, files, limits })
    }

    /// The reads of everything, or with `ranks` of the bytes in no parcel.
    fn reads(&self, ranks: Option<&RankShares<'_>>) -> StorageReads {
        let of_ranks: Vec<FileTraits>;
        let files = match ranks {
            None => self.files,
            // These gaps are other ranks' bytes: they do not read them.
            Some(_) => {
                of_ranks = self.files.iter().map(|file| FileTraits { gap: None, ..file.clone() }).collect();
                &of_ranks
            }
        };
        let schedule = Schedule::of_rank(self.checkpoint, &self.layout, files, &self.limits, ranks);
        let extents: Vec<&Extent> = schedule.extents.iter().filter(|e| e.shared.is_none()).collect();
        let bytes = |e: &&Extent| {
            let there = (e.offset + e.len).min(self.checkpoint.files()[e.file as usize].size) - e.offset;
            there - (e.len - e.bytes_read())
        };
        let (bytes, wanted): (u64, u64) = (extents.iter().map(bytes).sum(), extents.iter().map(|e| e.wanted).sum());
        StorageReads { bytes, count: extents.len() as u64, unwanted: bytes - wanted }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Write as _;

    /// A file of BF16 tensors with these shapes. It has a header and a hole.
    fn checkpoint(tensors: &[(&str, &[u64])]) -> (Checkpoint, tempfile::TempDir) {
        let (mut json, mut at) = (String::from("{"), 0);
        for (name, shape) in tensors {
            let past = at + 2 * shape.iter().product::<u64>();
            let comma = if at > 0 { "," } else { "" };
            write!(json, r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{at},{past}]}}"#)
                .unwrap();
            at = past;
        }
        json.push('}');
        while (8 + json.len()) % PAGE as usize > 0 {
            json.push(' ');
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.as_bytes());
        std::fs::write(&path, &bytes).unwrap();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(bytes.len() as u64 + at).unwrap();
        (Checkpoint::open(&[path]).unwrap(), folder)
    }

    const MIB: u64 = 1 << 20;

    fn reads(bytes: u64, count: u64, unwanted: u64) -> StorageReads {
        StorageReads { bytes, count, unwanted }
    }

    /// Four replicas of 8 MiB on two nodes: each reads 2 MiB, sends them three times, and gets 6.
    #[test]
    fn replicas_read_a_part_each_and_exchange_the_rest() {
        let (checkpoint, _folder) = checkpoint(&[("w", &[1024, 4096])]);
        let lists = [vec![Want::whole(0)]];
        let wants = RankWants { lists: &lists, of_rank: &[0; 4] };
        let found = PlannedTraffic::new(&checkpoint, wants, &[0, 0, 1, 1], Scope::World).unwrap();
        let rank = OfRank {
            wanted: 8 * MIB,
            read: 2 * MIB,
            reads: 2,
            parcels: 2,
            sent: 6 * MIB,
            received: 6 * MIB,
            unwanted: 0,
            alone: reads(8 * MIB, 2, 0),
        };
        assert_eq!(found.ranks, [rank; 4]);
        let node = OfNode { read: 4 * MIB, alone: 16 * MIB, sent: 8 * MIB, received: 8 * MIB };
        assert_eq!(found.nodes, [node; 2]);
    }

    /// Three of four ranks of a row-parallel weight: rows of 8 KiB, of which each wants 2 KiB.
    #[test]
    fn columns_bring_what_their_rank_does_not_want_or_what_no_rank_wants() {
        let (checkpoint, _folder) = checkpoint(&[("w", &[1024, 4096])]);
        let columns = |at: u64| vec![Want::part(0, [0..1024, 1024 * at..1024 * (at + 1)])];
        // Equal wants in two lists are one part.
        let lists = [columns(0), columns(1), columns(2), columns(2)];
        let wants = RankWants { lists: &lists, of_rank: &[0, 1, 2, 3] };
        let found = PlannedTraffic::new(&checkpoint, wants, &[0; 4], Scope::World).unwrap();
        let sum = |of: fn(&OfRank) -> u64| found.ranks.iter().map(of).sum::<u64>();
        assert_eq!(sum(|rank| rank.read), 8 * MIB, "whole pages: the last one has columns that nobody wants");
        assert_eq!(sum(|rank| rank.unwanted), 2 * MIB);
        // From the first to the last column that the rank wants, in two reads, which leave out a page between them.
        let alone = reads(8 * MIB - 2 * PAGE, 2, 6 * MIB - 2 * PAGE);
        assert!(found.ranks.iter().all(|rank| (rank.wanted, rank.alone) == (2 * MIB, alone)), "{:?}", found.ranks);
    }

    /// The same, but that nothing crosses the border of a node; a fifth rank alone on its node reads everything.
    #[test]
    fn within_nodes_each_node_reads_what_its_ranks_want() {
        let (checkpoint, _folder) = checkpoint(&[("w", &[1024, 4096])]);
        let lists = [vec![], vec![Want::whole(0)]];
        let wants = RankWants { lists: &lists, of_rank: &[1; 5] };
        let found = PlannedTraffic::new(&checkpoint, wants, &[0, 1, 1, 2, 0], Scope::Node).unwrap();
        let alone = reads(8 * MIB, 2, 0);
        let (read, sent, received) = (4 * MIB, 4 * MIB, 4 * MIB);
        let one_of_two = OfRank { wanted: 8 * MIB, read, reads: 4, parcels: 4, sent, received, unwanted: 0, alone };
        let single = OfRank { wanted: 8 * MIB, read: 8 * MIB, reads: 2, alone, ..OfRank::default() };
        assert_eq!(found.ranks, [one_of_two, one_of_two, one_of_two, single, one_of_two]);
        let two = OfNode { read: 8 * MIB, alone: 16 * MIB, ..OfNode::default() };
        assert_eq!(found.nodes, [two, two, OfNode { read: 8 * MIB, alone: 8 * MIB, ..OfNode::default() }]);
    }

    /// With turns of 16 MiB, 24 of a thousand ranks had twice as much to read as the others, and to send to all of them.
    #[test]
    fn a_thousand_replicas_read_as_much_each() {
        let (checkpoint, _folder) = checkpoint(&[("w", &[16 << 10, 512 << 10])]);
        let lists = [vec![Want::whole(0)]];
        let nodes: Vec<u32> = (0..1000).collect();
        let wants = RankWants { lists: &lists, of_rank: &[0; 1000] };
        let found = PlannedTraffic::new(&checkpoint, wants, &nodes, Scope::World).unwrap();
        let read: Vec<u64> = found.ranks.iter().map(|rank| rank.read).collect();
        let (least, most) = (read.iter().min().unwrap(), read.iter().max().unwrap());
        assert_eq!(read.iter().sum::<u64>(), 16 << 30);
        // What the others read in whole pages the last one lacks.
        let share = (16 << 30) / 1000;
        assert!(*most < share + 2 * PAGE && *least > share / 2, "{least} to {most}");
    }

    /// Two ranks want half of the columns each (4 KiB of 8 KiB rows): alone each reads everything, together half of it.
    #[test]
    fn columns_bring_their_neighbours_unless_ranks_exchange() {
        let (checkpoint, _folder) = checkpoint(&[("w", &[512, 4096])]);
        let columns = |from: u64| vec![Want::part(0, [0..512, from..from + 2048])];
        let lists = [columns(0), columns(2048)];
        let wants = RankWants { lists: &lists, of_rank: &[0, 1] };
        let found = PlannedTraffic::new(&checkpoint, wants, &[0, 1], Scope::World).unwrap();
        for rank in &found.ranks {
            assert_eq!((rank.wanted, rank.read, rank.sent, rank.received), (2 * MIB, 2 * MIB, MIB, MIB));
            // From the first wanted byte to the last: one half row is missing.
            assert_eq!(rank.alone.bytes, 4 * MIB - 4096);
        }
    }

    /// Rows that nobody else wants are read as they lie, and nothing is exchanged.
    #[test]
    fn what_one_rank_wants_is_exchanged_with_nobody() {
        let (checkpoint, _folder) = checkpoint(&[("w", &[512, 4096]), ("v", &[512, 4096])]);
        let lists = [vec![Want::whole(0)], vec![Want::whole(1)]];
        let wants = RankWants { lists: &lists, of_rank: &[1, 0] };
        let found = PlannedTraffic::new(&checkpoint, wants, &[0, 0], Scope::World).unwrap();
        let rank =
            OfRank { wanted: 4 * MIB, read: 4 * MIB, reads: 1, alone: reads(4 * MIB, 1, 0), ..OfRank::default() };
        assert_eq!(found.ranks, [rank; 2]);
        assert_eq!(found.nodes, [OfNode { read: 8 * MIB, alone: 8 * MIB, ..OfNode::default() }]);
    }

    /// The sums are those that ranks count when they load: parcel by parcel, for every rank that wants it.
    #[test]
    fn the_sums_are_those_of_the_parcels_one_by_one() {
        let (checkpoint, _folder) = checkpoint(&[("a", &[700, 3000]), ("b", &[5000]), ("c", &[300, 8192])]);
        let list = |rank: u64| {
            vec![
                Want::part(0, [0..700, rank * 1000..(rank + 1) * 1000]),
                Want::whole(1),
                Want::part(2, [rank * 100..(rank + 1) * 100, 0..8192]),
            ]
        };
        let lists = [list(0), list(1), list(2)];
        let (of_rank, nodes) = ([0, 1, 2, 0, 1, 2, 2], [0, 0, 0, 1, 1, 1, 2]);
        let wants = RankWants { lists: &lists, of_rank: &of_rank };
        let found = PlannedTraffic::new(&checkpoint, wants, &nodes, Scope::World).unwrap();
        let shares = Shares::new(&checkpoint, wants).unwrap();
        let (mut sent, mut received) = ([0; 7], [0; 7]);
        let (mut out, mut within) = ([0; 3], [0; 3]);
        for parcel in shares.parcels() {
            for &rank in shares.audience(parcel).iter().filter(|rank| **rank != parcel.reader) {
                let bytes: u64 = shares.parts(&checkpoint, rank, parcel).map(|p| p.dense.end - p.dense.start).sum();
                sent[parcel.reader as usize] += bytes;
                received[rank as usize] += bytes;
                let (from, to) = (nodes[parcel.reader as usize], nodes[rank as usize]);
                if from != to {
                    out[from as usize] += bytes;
                    within[to as usize] += bytes;
                }
            }
        }
        assert_eq!(found.ranks.iter().map(|r| r.sent).collect::<Vec<u64>>(), sent);
        assert_eq!(found.ranks.iter().map(|r| r.received).collect::<Vec<u64>>(), received);
        assert_eq!(
            found.nodes.iter().map(|n| (n.sent, n.received)).collect::<Vec<_>>(),
            [(out[0], within[0]), (out[1], within[1]), (out[2], within[2])]
        );
        assert!(sent.iter().all(|bytes| *bytes > 0));
    }
}
