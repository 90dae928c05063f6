//! The order in which a caller asks for parts of a file, and what that says of its next request. Pure.

use std::ops::Range;

/// Bytes that are read ahead at first.
pub(super) const FIRST: u64 = 512 << 10;
/// Requests this near to those before them follow them.
const NEAR: u64 = 512 << 10;
/// Requests that a caller must make in the other direction before the direction changes: several threads that take turns
/// ask for neighbours in any order.
const SURE: i32 = 4;

/// Where to read ahead: what lies behind a request, or before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Toward {
    Up,
    Down,
}

/// The order of requests for one file.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    /// The range of requests that follow each other; `None`: none yet.
    stretch: Option<Range<u64>>,
    /// Requests that made it longer upwards minus those that made it longer downwards, `SURE` at most either way.
    trend: i32,
    /// A part of the stretches before it, in bytes.
    before: u64,
    /// The end of the last read-ahead.
    edge: Option<(Toward, u64)>,
}

impl Sequence {
    /// The bytes that are read ahead now that `wanted` is asked for, at most `most` of them; `data` is where the tensors of the
    /// file begin. The result may go past the file.
    pub(super) fn asked(&mut self, wanted: Range<u64>, data: u64, most: u64) -> Option<(Toward, Range<u64>)> {
        let stretch = self.follow(wanted, data);
        let direction = match self.trend {
            1.. => Toward::Up,
            0 => return None,
            _ => Toward::Down,
        };
        // Twice of what was asked for in this order: what is read in vain is in proportion to what was of use.
        let ahead = (2 * (self.before + stretch.end - stretch.start)).max(FIRST).min(most);
        let edge = self.edge.filter(|(way, _)| *way == direction).map(|(_, edge)| edge);
        let range = match direction {
            Toward::Up => {
                let until = stretch.end + ahead;
                edge.filter(|edge| (stretch.end..=until).contains(edge)).unwrap_or(stretch.end)..until
            }
            Toward::Down => {
                let until = stretch.start.saturating_sub(ahead);
                until..edge.filter(|edge| (until..=stretch.start).contains(edge)).unwrap_or(stretch.start)
            }
        };
        // Half of it at once, and not a little with each request.
        let is_last = direction == Toward::Down && range.start == 0;
        if range.is_empty() || (range.end - range.start < ahead / 2 && !is_last) {
            return None;
        }
        self.edge = Some((direction, if direction == Toward::Up { range.end } else { range.start }));
        Some((direction, range))
    }

    /// The range of requests that follow each other, with this one.
    fn follow(&mut self, wanted: Range<u64>, data: u64) -> Range<u64> {
        let Some(stretch) = self.stretch.clone() else {
            // Most callers begin at the beginning.
            self.trend = i32::from(wanted.start <= data);
            self.stretch = Some(wanted.clone());
            return wanted;
        };
        let near = NEAR.max(wanted.end - wanted.start);
        let (up, distance) = if wanted.end > stretch.end {
            (1, wanted.start.saturating_sub(stretch.end))
        } else if wanted.start < stretch.start {
            (-1, stretch.start.saturating_sub(wanted.end))
        } else {
            // Another thread is a little behind, or a caller begins anew.
            (0, if self.trend < 0 { wanted.start - stretch.start } else { stretch.end - wanted.end })
        };
        let found = if distance <= near {
            self.trend = (self.trend + up).clamp(-SURE, SURE);
            stretch.start.min(wanted.start)..stretch.end.max(wanted.end)
        } else {
            // Elsewhere: perhaps the next of several stretches, perhaps no order at all.
            let passed = if self.trend == 0 { 0 } else { stretch.end - stretch.start };
            self.before = (self.before + passed) / 4;
            (self.trend, self.edge) = (i32::from(wanted.start <= data), None);
            wanted
        };
        self.stretch = Some(found.clone());
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MOST: u64 = 32 << 20;

    /// Asks for these parts, and gives what was read ahead last.
    fn asked(order: &mut Sequence, parts: impl IntoIterator<Item = Range<u64>>) -> Vec<(Toward, Range<u64>)> {
        parts.into_iter().filter_map(|part| order.asked(part, 0, MOST)).collect()
    }

    fn step(number: u64) -> Range<u64> {
        number * 64 * KIB..(number + 1) * 64 * KIB
    }

    #[test]
    fn what_follows_is_read_ahead_in_growing_steps_each_once() {
        let mut order = Sequence::default();
        let found = asked(&mut order, (0..1000).map(step));
        assert!(found.iter().all(|(direction, _)| *direction == Toward::Up));
        for (before, after) in found.iter().zip(&found[1..]) {
            assert_eq!(before.1.end, after.1.start);
        }
        assert_eq!(found[0].1, 64 * KIB..64 * KIB + FIRST);
        assert!(found.len() < 20, "{}", found.len());
    }

    #[test]
    fn backwards_too() {
        let mut order = Sequence::default();
        let found = asked(&mut order, (0..400).rev().map(step));
        assert!(found.iter().all(|(direction, _)| *direction == Toward::Down));
        for (before, after) in found.iter().zip(&found[1..]) {
            assert_eq!(before.1.start, after.1.end);
        }
        assert_eq!(found.last().unwrap().1.start, 0);
    }

    #[test]
    fn neighbours_out_of_order_do_not_turn_it_round() {
        let mut order = Sequence::default();
        let pairs = (0..200).flat_map(|pair| [step(2 * pair + 1), step(2 * pair)]);
        let found = asked(&mut order, pairs);
        assert!(found[1..].iter().all(|(direction, _)| *direction == Toward::Up));
        assert!((3..30).contains(&found.len()), "{}", found.len());
    }

    #[test]
    fn without_an_order_nothing_is_read_ahead() {
        let mut order = Sequence::default();
        let far = (0..500).map(|number| step((number * 1237) % 5000 + 1));
        assert_eq!(asked(&mut order, far).len(), 0);
    }

    #[test]
    fn a_second_pass_is_read_ahead_as_the_first_one() {
        let mut order = Sequence::default();
        asked(&mut order, (0..200).map(step));
        let again = asked(&mut order, (0..200).map(step));
        assert_eq!(again[0].1.start, step(0).end);
        assert!(again.last().unwrap().1.end >= step(199).end);
    }

    #[test]
    fn after_a_jump_what_follows_there_is_read_ahead() {
        let mut order = Sequence::default();
        asked(&mut order, (0..100).map(step));
        assert_eq!(asked(&mut order, [step(5000)]), []);
        let (direction, range) = asked(&mut order, [step(5001)]).remove(0);
        assert_eq!((direction, range.start), (Toward::Up, step(5001).end));
        // More than at first: the stretch before it was long.
        assert!(range.end - range.start > FIRST);
    }
}
