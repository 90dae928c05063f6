//! The extents of what several ranks want: parcels that this rank reads and sends, and those that it receives.

use super::making::{Making, RankShares};
use super::pieces::push;
use super::rules::Rules;
use crate::extent::{Extent, InCommon, Landing, Lane, Piece};
use crate::plan::shares::Parcel;
use std::ops::Range;

impl Making<'_> {
    /// Adds the parcels of these numbers that this rank reads (`own`), or those that other ranks send it.
    pub(super) fn parcels(&mut self, numbers: Range<u32>, own: bool) {
        let Some(RankShares { shares, rank, near, .. }) = self.ranks else { return };
        let (checkpoint, rank) = (self.checkpoint, *rank);
        for number in numbers {
            let parcel = &shares.parcels()[number as usize];
            if (parcel.reader == rank) != own || !shares.audience(parcel).contains(&rank) {
                continue;
            }
            self.scratch.clear();
            let lent = !own && near.get(parcel.reader as usize).is_some_and(|near| *near);
            let mut packed = 0;
            for part in shares.parts(checkpoint, rank, parcel) {
                let place = self.layout.places[part.want as usize];
                let (to, len) = (place.offset + part.dense.start, part.dense.end - part.dense.start);
                let (want, block) = (part.want, place.block);
                if !own && !lent {
                    self.scratch.push(Piece::row(want, block, packed, to, len));
                    packed += len;
                    continue;
                }
                for (from, dense) in self.layout.runs[want as usize].rows(part.dense.clone()) {
                    let (to, len) = (place.offset + dense.start, dense.end - dense.start);
                    push(&mut self.scratch, Piece::row(want, block, from, to, len));
                }
            }
            let traits = self.files.get(parcel.file as usize);
            match (own, traits) {
                (true, Some(traits)) => {
                    let size = checkpoint.files()[parcel.file as usize].size;
                    let rules = Rules::read(parcel.file, traits, self.limits, size);
                    self.emit_parcel(&rules, number, parcel);
                }
                _ if lent && !self.scratch.is_empty() => self.emit_lent(parcel, number),
                _ if packed > 0 => self.emit_received(parcel, number, packed),
                _ => {}
            }
        }
    }

    /// Makes an extent of a parcel that this rank reads.
    fn emit_parcel(&mut self, rules: &Rules, number: u32, parcel: &Parcel) {
        let resident = &rules.resident[rules.resident.partition_point(|r| r.end <= parcel.start)..];
        let warm = resident.first().is_some_and(|r| r.start <= parcel.start && r.end >= parcel.end);
        let lane = rules.by_slab(if warm { rules.warm } else { rules.cold });
        let (offset, past) = match lane.whole_units {
            false => (parcel.start, parcel.end),
            true => (rules.down(parcel.start), rules.up(parcel.end)),
        };
        let pieces = self.keep(offset);
        let (len, need) = (past - offset, parcel.end - offset);
        self.schedule.extents.push(Extent {
            file: rules.file,
            offset,
            len,
            need,
            lane,
            landing: Landing::Slab,
            staging: lane.staging,
            pieces,
            wanted: parcel.end - parcel.start,
            slack: len - (parcel.end - parcel.start),
            shared: Some(InCommon::Sent(number)),
            rows: None,
        });
    }

    /// Makes an extent of a parcel that comes in its reader's slab.
    fn emit_lent(&mut self, parcel: &Parcel, number: u32) {
        let wanted = self.scratch.iter().map(Piece::nbytes).sum();
        let pieces = self.keep(parcel.start);
        let len = parcel.end - parcel.start;
        self.schedule.extents.push(Extent {
            file: parcel.file,
            offset: parcel.start,
            len,
            need: len,
            lane: Lane::NEIGHBOUR,
            landing: Landing::Slab,
            staging: Lane::NEIGHBOUR.staging,
            pieces,
            wanted,
            slack: 0,
            shared: Some(InCommon::Received { parcel: number, reader: parcel.reader }),
            rows: None,
        });
    }

    /// Makes an extent of what comes of a parcel from its reader.
    fn emit_received(&mut self, parcel: &Parcel, number: u32, len: u64) {
        let strided = self.scratch.iter().any(|piece| self.layout.strides_of(piece.want).is_some());
        let pieces = self.keep(0);
        self.schedule.extents.push(Extent {
            file: parcel.file,
            offset: 0,
            len,
            need: len,
            lane: Lane::RANK,
            landing: if strided || !self.into_memory { Landing::Slab } else { Landing::Scatter },
            staging: Lane::RANK.staging,
            pieces,
            wanted: len,
            slack: 0,
            shared: Some(InCommon::Received { parcel: number, reader: parcel.reader }),
            rows: None,
        });
    }
}
