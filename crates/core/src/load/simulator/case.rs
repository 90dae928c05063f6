//! Loads of the simulator: a checkpoint with headers and holes, the wants of each rank, and its schedule, made by the
//! code of every load. A case is checked byte by byte, without moving any.

use super::random::Rng;
use crate::extent::{Declared, Extent, InCommon, Landing, TakesSlab};
use crate::format::Checkpoint;
use crate::load::exchange::rows;
use crate::options::{Options, Order, PAGE};
use crate::plan::layout::{Layout, Target};
use crate::plan::schedule::{FileTraits, Limits, RankShares, Schedule};
use crate::plan::shares::{RankWants, Shares, PARCEL};
use crate::plan::want::Want;
use crate::way::Way;
use crate::{extent::Lane, plan::layout::BlockKind};
use std::fmt::Write as _;
use std::sync::Arc;

/// Files of BF16 tensors with these shapes.
pub(super) struct Model {
    pub(super) checkpoint: Checkpoint,
    _folder: tempfile::TempDir,
}

impl Model {
    pub(super) fn new(files: &[Vec<Vec<u64>>]) -> Model {
        let folder = tempfile::tempdir().unwrap();
        let mut paths = Vec::new();
        for (file, tensors) in files.iter().enumerate() {
            let (mut json, mut at) = (String::from("{"), 0);
            for (number, shape) in tensors.iter().enumerate() {
                let past = at + 2 * shape.iter().product::<u64>();
                let comma = if number > 0 { "," } else { "" };
                let name = format!("{file}.{number}");
                write!(json, r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{at},{past}]}}"#)
                    .unwrap();
                at = past;
            }
            json.push('}');
            let path = folder.path().join(format!("{file}.safetensors"));
            let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
            bytes.extend(json.as_bytes());
            std::fs::write(&path, &bytes).unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_len(bytes.len() as u64 + at).unwrap();
            paths.push(path);
        }
        Model { checkpoint: Checkpoint::open(&paths).unwrap(), _folder: folder }
    }

    /// Shapes as a transformer has them, 16 MB.
    pub(super) fn transformer() -> Model {
        let layer = |_| vec![vec![512], vec![1024, 512], vec![512, 1024], vec![512], vec![0, 7], vec![]];
        let first: Vec<Vec<u64>> = std::iter::once(vec![2048, 512]).chain((0..3).flat_map(layer)).collect();
        let second: Vec<Vec<u64>> = (0..3).flat_map(layer).chain([vec![512], vec![2048, 512]]).collect();
        Model::new(&[first, second])
    }
}

/// The wants of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Everything.
    Replicas,
    /// Columns of matrices.
    Columns,
    /// Rows of matrices.
    Rows,
    /// Columns of every second matrix and rows of the others, two replicas of each if there are so many ranks.
    Mixed,
    /// A tensor each: nothing is exchanged.
    Apart,
}

impl Wanted {
    pub(super) const ALL: [Wanted; 5] = [Wanted::Replicas, Wanted::Columns, Wanted::Rows, Wanted::Mixed, Wanted::Apart];

    /// The lists, and the number of each rank's list.
    fn lists(self, checkpoint: &Checkpoint, ranks: u32) -> (Vec<Vec<Want>>, Vec<u32>) {
        let parts = match self {
            Wanted::Replicas => return (vec![Want::all(checkpoint)], vec![0; ranks as usize]),
            Wanted::Mixed if ranks % 2 == 0 => ranks / 2,
            _ => ranks,
        };
        let list = |part: u32| {
            let want = |tensor: u32| {
                let shape = checkpoint.tensor(tensor).shape.to_vec();
                if self == Wanted::Apart {
                    return (tensor % ranks == part).then(|| Want::whole(tensor));
                }
                let along = match self {
                    Wanted::Columns => 1,
                    Wanted::Mixed => u64::from(tensor % 2) as usize,
                    _ => 0,
                };
                if shape.len() < 2 {
                    return Some(Want::whole(tensor));
                }
                let cut = |(axis, size): (usize, &u64)| match axis == along {
                    true => size * u64::from(part) / u64::from(parts)..size * u64::from(part + 1) / u64::from(parts),
                    false => 0..*size,
                };
                Some(Want::part(tensor, shape.iter().enumerate().map(cut)))
            };
            (0..checkpoint.len() as u32).filter_map(want).collect()
        };
        ((0..parts).map(list).collect(), (0..ranks).map(|rank| rank % parts).collect())
    }
}

/// A mistake in a plan, for the world to notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Misplan {
    /// A parcel that is read for others is taken for the rank's own.
    SentIsOwn,
    /// A parcel that others wait for is read by nobody.
    ReadByNobody,
    /// A rank waits twice for a parcel that comes once.
    ReceivedTwice,
    /// Two parcels that come from others are taken for each other.
    ReceivedAsAnother,
    /// A rank reads, and sends, what another one reads.
    ReadByTwo,
    /// A rank wants a parcel and is not ready for it.
    NotReceived,
}

impl Misplan {
    pub(super) const ALL: [Misplan; 6] = [
        Misplan::SentIsOwn,
        Misplan::ReadByNobody,
        Misplan::ReceivedTwice,
        Misplan::ReceivedAsAnother,
        Misplan::ReadByTwo,
        Misplan::NotReceived,
    ];
}

/// The machines of the ranks, and which ranks share slabs with others of their machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Nodes {
    pub(super) ranks: u32,
    pub(super) nodes: u32,
    /// A bit for each of the first ranks. The others share nothing.
    pub(super) sharing: u64,
}

impl Nodes {
    /// A rank on each node.
    pub(super) fn apart(ranks: u32) -> Nodes {
        Nodes { ranks, nodes: ranks, sharing: 0 }
    }

    pub(super) fn node_of(self, rank: u32) -> u32 {
        rank * self.nodes / self.ranks
    }

    /// True if this rank can share slabs with other ranks of its machine.
    pub(super) fn shares(self, rank: u32) -> bool {
        self.sharing.checked_shr(rank).unwrap_or(0) & 1 == 1
    }

    /// True if the plan of one rank counts the other one as its neighbour.
    fn is_near(self, rank: u32, other: u32) -> bool {
        self.shares(rank) && self.node_of(rank) == self.node_of(other)
    }
}

/// The plans of all ranks.
pub(super) struct Case<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) shares: Arc<Shares>,
    pub(super) of_rank: Vec<u32>,
    pub(super) nodes: Nodes,
    /// By list.
    layouts: Vec<Arc<Layout>>,
    pub(super) schedules: Vec<Arc<Schedule>>,
}

/// Direct reads of storage that answers late.
const LATE: Lane = Lane::new(&Declared {
    whole_units: true,
    scatters: false,
    staging: TakesSlab::AtArrival,
    ..Declared::named("late")
});

impl<'a> Case<'a> {
    /// `gpu`: what comes from others needs slabs. `late`: the storage takes slabs at arrival.
    pub(super) fn new(model: &'a Model, wanted: Wanted, nodes: Nodes, gpu: bool, late: bool) -> Case<'a> {
        let (checkpoint, ranks) = (&model.checkpoint, nodes.ranks);
        let (lists, of_rank) = wanted.lists(checkpoint, ranks);
        let shares = Arc::new(Shares::new(checkpoint, RankWants { lists: &lists, of_rank: &of_rank }).unwrap());
        let target = if gpu { Target::Gpu } else { Target::Cpu { misaligned: false } };
        let layout = |wants: &Vec<Want>| Arc::new(Layout::new(checkpoint, wants, &target, Order::File).unwrap());
        let layouts: Vec<Arc<Layout>> = lists.iter().map(layout).collect();
        let way = Way { cold: if late { LATE } else { Lane::DIRECT }, ..Way::default() };
        let file = FileTraits { unit: Some(512), way, ..FileTraits::default() };
        let files = vec![file; checkpoint.files().len()];
        let options = Options::default();
        let scatter = (!gpu).then_some(4096);
        let limits =
            Limits { extent: options.extent, gap: options.least_gap(), scatter, direct_in_place: true, window: None };
        let schedule = |rank: u32| {
            let near: Vec<bool> = (0..nodes.ranks).map(|other| nodes.is_near(rank, other)).collect();
            let ranks = RankShares { near: &near, ..RankShares::new(&shares, rank) };
            let layout = &layouts[of_rank[rank as usize] as usize];
            Arc::new(Schedule::of_rank(checkpoint, layout, &files, &limits, Some(&ranks)))
        };
        let schedules: Vec<Arc<Schedule>> = (0..ranks).map(schedule).collect();
        Case { checkpoint, shares, of_rank, nodes, layouts, schedules }
    }

    pub(super) fn layout(&self, rank: u32) -> &Arc<Layout> {
        &self.layouts[self.of_rank[rank as usize] as usize]
    }

    /// Makes this mistake at one rank. False: the plan has nothing that it could be made with.
    pub(super) fn misplan(&mut self, misplan: Misplan, rng: &mut Rng) -> bool {
        let sent = |e: Option<InCommon>| matches!(e, Some(InCommon::Sent(_)));
        let received = |e: Option<InCommon>| matches!(e, Some(InCommon::Received { .. }));
        let of_sent = matches!(misplan, Misplan::SentIsOwn | Misplan::ReadByNobody);
        let mut places: Vec<(usize, usize)> = Vec::new();
        for (rank, schedule) in self.schedules.iter().enumerate() {
            let all = schedule.extents.iter().enumerate();
            let fits = |shared| if of_sent { sent(shared) } else { received(shared) };
            places.extend(all.filter(|(_, e)| fits(e.shared)).map(|(at, _)| (rank, at)));
        }
        if places.is_empty() {
            return false;
        }
        let (rank, at) = places[rng.below(places.len() as u64) as usize];
        let mut schedule = (*self.schedules[rank]).clone();
        let shared = schedule.extents[at].shared;
        match (misplan, shared) {
            (Misplan::SentIsOwn, _) => schedule.extents[at].shared = None,
            (Misplan::ReadByNobody | Misplan::NotReceived, _) => drop(schedule.extents.remove(at)),
            (Misplan::ReceivedTwice, _) => {
                let again = schedule.extents[at].clone();
                schedule.extents.insert(at, again);
            }
            (Misplan::ReceivedAsAnother, _) => {
                let others = (0..schedule.extents.len()).filter(|&i| i != at && received(schedule.extents[i].shared));
                let others: Vec<usize> = others.collect();
                if others.is_empty() {
                    return false;
                }
                let other = others[rng.below(others.len() as u64) as usize];
                schedule.extents[at].shared = schedule.extents[other].shared;
                schedule.extents[other].shared = shared;
            }
            (Misplan::ReadByTwo, Some(InCommon::Received { parcel, .. })) => {
                let e = &mut schedule.extents[at];
                e.landing = Landing::Slab;
                e.shared = Some(InCommon::Sent(parcel));
            }
            (Misplan::ReadByTwo, _) => return false,
        }
        self.schedules[rank] = Arc::new(schedule);
        true
    }

    /// Whether the pieces of all extents bring every wanted byte, once and to its place, and what a reader sends of a parcel is what
    /// the pieces of its receiver expect.
    pub(super) fn check(&self) -> Result<(), String> {
        for (rank, schedule) in (0..).zip(&self.schedules) {
            let layout = self.layout(rank);
            let mut found: Vec<Vec<(u64, u64)>> = vec![Vec::new(); layout.places.len()];
            for e in &schedule.extents {
                // A parcel with the pages around it, or what `extent` allows.
                let most = if e.shared.is_some() { PARCEL + 2 * PAGE } else { Options::default().extent };
                if e.landing == Landing::Slab && e.len > most {
                    return Err(format!("rank {rank} needs a slab of {} bytes", e.len));
                }
                let lent = e.lane == Lane::NEIGHBOUR;
                if let (true, Some(InCommon::Received { parcel, .. })) = (lent, e.shared) {
                    let parcel = &self.shares.parcels()[parcel as usize];
                    let whole = (parcel.file, parcel.start, parcel.end);
                    if (e.file, e.offset, e.offset + e.len) != whole || e.landing != Landing::Slab {
                        return Err(format!("rank {rank} borrows other bytes than its reader has: {e:?}"));
                    }
                }
                let pieces = &schedule.pieces[e.pieces.start as usize..e.pieces.end as usize];
                let mut expected: Vec<(u64, u64)> = Vec::new();
                for piece in pieces {
                    let place = layout.places[piece.want as usize];
                    for row in 0..piece.rows {
                        let dense = piece.to - place.offset + row * piece.to_stride;
                        let dense = dense..dense + piece.len;
                        found[piece.want as usize].push((dense.start, dense.end));
                        let from = e.offset + piece.from + row * piece.from_stride;
                        if from + piece.len > e.offset + e.len {
                            return Err(format!("rank {rank} takes bytes beyond an extent"));
                        }
                        for (at, part) in layout.runs[piece.want as usize].rows(dense.clone()) {
                            let len = part.end - part.start;
                            if let (Some(InCommon::Received { .. }), false) = (e.shared, lent) {
                                match expected.last_mut() {
                                    Some(last) if last.0 + last.1 == at => last.1 += len,
                                    _ => expected.push((at, len)),
                                }
                            } else if at != from + (part.start - dense.start) {
                                return Err(format!("rank {rank} takes byte {at} for another"));
                            }
                        }
                    }
                }
                if let (Some(InCommon::Received { parcel, .. }), false) = (e.shared, lent) {
                    let (nbytes, sent) = rows(&self.shares, self.checkpoint, parcel, rank);
                    let sent: Vec<(u64, u64)> = sent.collect();
                    if sent != expected || nbytes != e.len || sent.iter().map(|row| row.1).sum::<u64>() != e.len {
                        return Err(format!(
                            "rank {rank} expects other bytes of parcel {parcel} than its reader sends"
                        ));
                    }
                }
            }
            for (want, mut parts) in found.into_iter().enumerate() {
                parts.sort_unstable();
                let apart = parts.windows(2).all(|pair| pair[0].1 == pair[1].0);
                let ends = (parts.first().map_or(0, |p| p.0), parts.last().map_or(0, |p| p.1));
                if !apart || ends != (0, layout.places[want].nbytes) {
                    return Err(format!("rank {rank} gets want {want} not once: {parts:?}"));
                }
            }
            let mirrors = layout.blocks.iter().any(|block| matches!(block.kind, BlockKind::Mirror { .. }));
            // What is read for others or lent is not read in place.
            let in_slabs = |e: &&Extent| matches!(e.shared, Some(InCommon::Sent(_))) || e.lane == Lane::NEIGHBOUR;
            let mut others = schedule.extents.iter().filter(|e| !in_slabs(e)).peekable();
            if mirrors && others.peek().is_some() && others.all(|e| e.landing == Landing::Slab) {
                return Err("nothing lands in place".to_owned());
            }
        }
        Ok(())
    }
}
