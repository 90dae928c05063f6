//! The words that sources, the plan, the engine and devices share: how a part of a file travels, and what becomes of it.

use std::ops::Range;

/// Names one read (or copy) from its submission to its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// One way in which bytes of an object come. Stores declare theirs. Plan, engine and loads look at what a lane
/// [declares](Declared); its name is for reports and traces.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lane(&'static Declared);

/// The properties of a lane.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Declared {
    /// As reports and traces spell it.
    pub name: &'static str,
    /// Reads begin and end at whole units of the file: pages, or the alignment of O_DIRECT. They bring extra bytes.
    pub whole_units: bool,
    /// Where its bytes can arrive.
    pub lands: Lands,
    /// One read can bring bytes to several places in memory.
    pub scatters: bool,
    /// When the slab of a read that lands in one is taken.
    pub staging: TakesSlab,
    /// Its bytes come in another process' slab, which it lends, and need none of this process.
    pub lends_slab: bool,
    /// The lane of a read that this one refuses: it lands in the same place. `None`: such a read has failed.
    pub refused: Option<Lane>,
}

impl Declared {
    /// Reads of any length into memory of this process, from a store that answers at once. A read that it refuses has failed.
    pub const fn named(name: &'static str) -> Declared {
        let (lands, staging) = (Lands::Host, TakesSlab::AtRequest);
        Declared { name, whole_units: false, lands, scatters: true, staging, lends_slab: false, refused: None }
    }
}

/// Where the bytes of a lane can arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lands {
    /// In a mapping of the file.
    Mapping,
    /// In memory of this process.
    Host,
    /// In memory of a device: the source writes there itself, to several places with one read. It is told the fence of each
    /// allocation before that ([`Source::wait_for`](crate::source::Source::wait_for)).
    Device,
}

impl Lane {
    /// Pages of a file are mapped, and populated in place.
    pub const MAPPED: Lane =
        Lane(&Declared { whole_units: true, lands: Lands::Mapping, scatters: false, ..Declared::named("mapped") });
    /// Reads through the page cache.
    pub const BUFFERED: Lane = Lane(&Declared::named("buffered"));
    /// O_DIRECT: reads past the page cache.
    pub const DIRECT: Lane = Lane(&Declared {
        whole_units: true,
        scatters: false,
        refused: Some(Lane::BUFFERED),
        ..Declared::named("direct")
    });
    /// Answers of a server. Slabs are taken at arrival, so its source has [`land`](crate::source::Source::land).
    pub const NETWORK: Lane = Lane(&Declared { staging: TakesSlab::AtArrival, ..Declared::named("network") });
    /// Bytes that another rank has read and sends.
    pub const RANK: Lane = Lane(&Declared { staging: TakesSlab::AtArrival, ..Declared::named("rank") });

    /// Bytes that another rank of this machine has read into a slab that both of them map: they come with that slab. If ranks
    /// cannot share it, they are sent.
    pub const NEIGHBOUR: Lane = Lane::new(&Declared {
        staging: TakesSlab::AtArrival,
        scatters: false,
        lends_slab: true,
        refused: Some(Lane::RANK),
        ..Declared::named("neighbour")
    });

    /// Bytes of a server's object that another node has given.
    pub const MIRROR: Lane = Lane(&Declared { staging: TakesSlab::AtArrival, ..Declared::named("mirror") });

    /// Bytes of a server's object that the disk cache has. A part that it has no longer comes from the server.
    pub const DISK_CACHE: Lane = Lane::new(&Declared {
        staging: TakesSlab::AtArrival,
        refused: Some(Lane::NETWORK),
        ..Declared::named("disk_cache")
    });

    /// The lanes of this crate's own stores, in the order of reports.
    pub const ALL: [Lane; 8] = [
        Lane::MAPPED,
        Lane::BUFFERED,
        Lane::DIRECT,
        Lane::NETWORK,
        Lane::MIRROR,
        Lane::DISK_CACHE,
        Lane::RANK,
        Lane::NEIGHBOUR,
    ];

    /// The lane of a store. A lane that takes its refused reads lands in the same kind of memory, takes slabs at the same time,
    /// and scatters if this one does: a read has its place already.
    pub const fn new(declared: &'static Declared) -> Lane {
        if let Some(Lane(next)) = declared.refused {
            assert!(next.lands as u8 == declared.lands as u8, "a refused read lands elsewhere");
            assert!(next.staging as u8 == declared.staging as u8, "a refused read has a slab, or waits for one");
            assert!(next.scatters || !declared.scatters, "a refused read has several places");
            assert!(declared.whole_units || !next.whole_units, "a refused read begins and ends anywhere");
        }
        Lane(declared)
    }

    /// The bytes come in a mapping of the file.
    pub fn is_mapping(self) -> bool {
        self.lands == Lands::Mapping
    }

    /// The bytes come to memory of a device.
    pub fn lands_on_device(self) -> bool {
        self.lands == Lands::Device
    }
}

/// The lanes of one file. Its store declares them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLanes {
    /// Reads of any range.
    pub any: Lane,
    /// The ranges that [`Objects::resident_within`](crate::store::Objects::resident_within) finds: in the page cache, or in a copy
    /// that the store has. Short ones come with the bytes around them.
    pub near: Lane,
    /// Reads past the page cache, in whole units. `None`: there are none.
    pub past_cache: Option<Lane>,
    /// Pages that are mapped. `None`: mapping the file is not possible, or not safe. If a remote machine truncates or loses a
    /// mapped file, its reader is killed.
    pub mapping: Option<Lane>,
    /// Loads to a device: ranges that are not resident land there. `None`: they come by a slab.
    pub device: Option<Lane>,
    /// Bytes that addresses, offsets and lengths of reads in whole units must be multiples of. `None`: no lane has such
    /// reads, except mapped pages. If the kernel does not say (before 6.1, and most network file systems), 4096 is assumed;
    /// a read may then still be refused.
    pub unit: Option<u64>,
}

impl FileLanes {
    /// A file whose bytes all come by one lane, in reads of any range.
    pub const fn only(lane: Lane) -> FileLanes {
        FileLanes { any: lane, near: lane, past_cache: None, mapping: None, device: None, unit: None }
    }

    /// Each lane lands in the kind of memory for which it stands here.
    pub(crate) fn are_possible(&self) -> bool {
        let host = [Some(self.any), Some(self.near), self.past_cache];
        host.into_iter().flatten().all(|lane| lane.lands == Lands::Host)
            && self.mapping.is_none_or(Lane::is_mapping)
            && self.device.is_none_or(Lane::lands_on_device)
    }
}

impl std::ops::Deref for Lane {
    type Target = Declared;

    fn deref(&self) -> &Declared {
        self.0
    }
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Bytes and extents of one lane: planned in a schedule, arrived in a report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LaneTotals {
    /// Bytes, slack and gaps included.
    pub bytes: u64,
    /// Extents: one I/O each.
    pub extents: u64,
}

/// The totals of each lane that was used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ByLane(Vec<(Lane, LaneTotals)>);

impl ByLane {
    /// Adds an extent of `bytes` bytes.
    pub fn count(&mut self, lane: Lane, bytes: u64) {
        let at = self.0.iter().position(|(known, _)| known.name == lane.name).unwrap_or_else(|| {
            self.0.push((lane, LaneTotals::default()));
            self.0.len() - 1
        });
        let totals = &mut self.0[at].1;
        totals.bytes += bytes;
        totals.extents += 1;
    }

    /// The totals of one lane.
    pub fn of(&self, lane: Lane) -> LaneTotals {
        self.0.iter().find(|(known, _)| known.name == lane.name).map_or_else(LaneTotals::default, |(_, totals)| *totals)
    }

    /// All lanes of [`Lane::ALL`], then the others that were used.
    pub fn iter(&self) -> impl Iterator<Item = (Lane, LaneTotals)> + '_ {
        let others = self.0.iter().filter(|(lane, _)| !Lane::ALL.iter().any(|known| known.name == lane.name));
        Lane::ALL.into_iter().map(|lane| (lane, self.of(lane))).chain(others.copied())
    }

    /// The sum of all lanes.
    pub fn sum(&self) -> LaneTotals {
        self.0.iter().fold(LaneTotals::default(), |sum, (_, one)| LaneTotals {
            bytes: sum.bytes + one.bytes,
            extents: sum.extents + one.extents,
        })
    }
}

/// Where an extent's bytes arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Landing {
    /// In the file's own mapping: populated, not copied.
    Mapping {
        /// The first mapped block of the file.
        block: u32,
        /// Whether the page cache held all of it when the load asked.
        resident: bool,
    },
    /// In place in the mirror blocks of one stretch, at the extent's own offset within a page (alignment slack included).
    Block {
        /// The first block of the stretch.
        block: u32,
    },
    /// The read itself scatters it to its pieces' places: a lane that scatters, into CPU memory, or one that lands on a device.
    Scatter,
    /// In a slab. Then its pieces are copied to their places.
    Slab,
}

/// When the slab of an extent that lands in one is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TakesSlab {
    /// Before the read is sent. Its bytes may come at any moment.
    #[default]
    AtRequest,
    /// When the first byte has arrived. For stores that answer late: a request on its way holds no slab.
    AtArrival,
}

/// The work that the allocating stream still has for a granted block: an event that a writer must wait for (a
/// `CUevent`, owned by the caller and valid until the load has ended).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fence(pub u64);

/// One contiguous byte range of one file, read by one I/O.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// The file.
    pub file: u32,
    /// First byte read. For direct reads it is page-aligned; so is the end, unless the file ends there.
    pub offset: u64,
    /// Bytes read.
    pub len: u64,
    /// Bytes from `offset` that must arrive. The rest, after the last wanted byte, may be cut short by the end of the
    /// file.
    pub need: u64,
    /// The lane it starts with. If the lane is refused, another one is taken during the load.
    pub lane: Lane,
    /// Where its bytes arrive.
    pub landing: Landing,
    /// When its slab is taken, if it lands in one.
    pub staging: TakesSlab,
    /// Its pieces in [`Schedule::pieces`](crate::plan::schedule::Schedule::pieces).
    pub pieces: Range<u32>,
    /// Distinct wanted bytes in it; the rest of `len` is slack and gaps.
    pub wanted: u64,
    /// Bytes of alignment slack before the first and after the last wanted byte.
    pub slack: u64,
    /// The parcel that it is, if several ranks want it.
    pub shared: Option<InCommon>,
    /// How it is read row by row, if it is: short rows of bytes that the page cache holds.
    pub rows: Option<ByRows>,
}

/// How an extent is read row by row. In a slab its rows lie one behind the other, piece after piece, and are together no
/// longer than the extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByRows {
    /// Gaps between rows are read up to this many bytes. Longer ones are skipped.
    pub gap: u64,
    /// Bytes of the extent that are skipped.
    pub skipped: u64,
}

/// A parcel of [`Shares`](crate::plan::shares::Shares), by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InCommon {
    /// This rank reads it and sends it to others.
    Sent(u32),
    /// Another rank reads it. If it sends what this rank wants, the extent counts these bytes from 0. If it lends its slab, the
    /// extent is the parcel.
    Received {
        /// Its number.
        parcel: u32,
        /// The rank that reads it.
        reader: u32,
    },
}

impl Extent {
    /// Bytes that its read brings.
    pub fn bytes_read(&self) -> u64 {
        match self.is_received() {
            true => self.wanted,
            false => self.len - self.rows.map_or(0, |rows| rows.skipped),
        }
    }

    /// It needs a slab of this process.
    pub(crate) fn takes_slab(&self) -> bool {
        self.landing == Landing::Slab && !self.lane.lends_slab
    }

    /// Another rank reads it.
    pub fn is_received(&self) -> bool {
        matches!(self.shared, Some(InCommon::Received { .. }))
    }

    /// Whether its read is sent without a place to land. The place is given when its first byte has arrived.
    pub fn lands_on_arrival(&self) -> bool {
        self.landing == Landing::Slab && self.staging == TakesSlab::AtArrival
    }
}

/// One copy from an extent to a block: `rows` rows of `len` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The want whose bytes these are.
    pub want: u32,
    /// Number of the block.
    pub block: u32,
    /// Offset of the first row in the extent.
    pub from: u64,
    /// Offset of the first row in the block.
    pub to: u64,
    /// Bytes of each row.
    pub len: u64,
    /// Number of rows, at least 1.
    pub rows: u64,
    /// Bytes from one row to the next in the extent (anything where `rows` is 1).
    pub from_stride: u64,
    /// Bytes from one row to the next in the block.
    pub to_stride: u64,
}

impl Piece {
    /// One row.
    pub fn row(want: u32, block: u32, from: u64, to: u64, len: u64) -> Piece {
        Piece { want, block, from, to, len, rows: 1, from_stride: len, to_stride: len }
    }

    /// Bytes it copies.
    pub fn nbytes(&self) -> u64 {
        self.len * self.rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_stands_only_for_memory_in_which_it_lands() {
        const ONTO: Lane = Lane::new(&Declared { lands: Lands::Device, ..Declared::named("onto") });
        let files = FileLanes {
            past_cache: Some(Lane::DIRECT),
            mapping: Some(Lane::MAPPED),
            ..FileLanes::only(Lane::BUFFERED)
        };
        assert!(files.are_possible() && FileLanes { device: Some(ONTO), ..files }.are_possible());
        for wrong in [
            FileLanes { mapping: Some(Lane::DIRECT), ..files },
            FileLanes { device: Some(Lane::BUFFERED), ..files },
            FileLanes { near: Lane::MAPPED, ..files },
            FileLanes { past_cache: Some(ONTO), ..files },
            FileLanes::only(ONTO),
        ] {
            assert!(!wrong.are_possible(), "{wrong:?}");
        }
    }
}
