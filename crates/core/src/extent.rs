//! The words that sources, the plan, the engine and devices share: how a part of a file travels, and what becomes of it.

use std::ops::Range;

/// Names one read (or copy) from its submission to its completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// How an extent travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Route {
    /// Pages of the file are mapped and populated in place.
    Mapped,
    /// Read through the page cache by copy workers.
    Buffered,
    /// O_DIRECT.
    Direct,
}

impl Route {
    /// All of them, in the order of reports.
    pub const ALL: [Route; 3] = [Route::Mapped, Route::Buffered, Route::Direct];

    /// As reports and traces spell it.
    pub fn name(self) -> &'static str {
        match self {
            Route::Mapped => "mapped",
            Route::Buffered => "buffered",
            Route::Direct => "direct",
        }
    }
}

/// Bytes and extents of one route: planned in a schedule, arrived in a report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RouteTotals {
    /// Bytes, slack and gaps included.
    pub bytes: u64,
    /// Extents: one I/O each.
    pub extents: u64,
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
    /// The read itself scatters it to its pieces' places (buffered route into CPU memory).
    Scatter,
    /// In a slab. Then its pieces are copied to their places.
    Slab,
}

/// When the slab of an extent that lands in one is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TakesSlab {
    /// Before the read is sent. Its bytes may come at any moment.
    #[default]
    AtRequest,
    /// When the first byte has arrived. For stores that answer late: a request on its way holds no slab.
    AtArrival,
}

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
    /// The route it starts with. If the route is refused, it may change during the load.
    pub route: Route,
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
    /// Its reader sends what this rank wants of it.
    Received(u32),
}

impl Extent {
    /// Bytes that its read brings.
    pub fn bytes_read(&self) -> u64 {
        self.len - self.rows.map_or(0, |rows| rows.skipped)
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
    /// Bytes it copies.
    pub fn nbytes(&self) -> u64 {
        self.len * self.rows
    }
}
