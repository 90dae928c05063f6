//! Wants as bytes: what a rank tells the others about what it wants.
//!
//! A sequence of groups. Each begins with a number: twice the distance from the tensor after the last one, plus 1 for a part.
//! For whole tensors a count follows, and the group is so many neighbours. For a part the number of dimensions follows, and start,
//! length and step of each. All numbers are LEB128. Tensors may go backwards: the distance is in zigzag.

use super::want::{AxisSlice, Want};
use crate::error::{Error, ErrorKind, Result};
use std::ops::Range;

/// Dimensions of one want, at most: no framework has tensors with more.
const DIMENSIONS: u64 = 256;

/// These wants, in order.
pub fn pack(wants: &[Want]) -> Vec<u8> {
    let (mut bytes, mut next) = (Vec::new(), 0i64);
    let mut rest = wants;
    while let Some(first) = rest.first() {
        let distance = i64::from(first.tensor) - next;
        let zigzag = ((distance << 1) ^ (distance >> 63)) as u64;
        let Some(region) = &first.region else {
            let neighbours = rest.iter().zip(first.tensor..).take_while(|(w, t)| w.region.is_none() && w.tensor == *t);
            let count = neighbours.count();
            number(&mut bytes, zigzag << 1);
            number(&mut bytes, count as u64);
            next = i64::from(first.tensor) + count as i64;
            rest = &rest[count..];
            continue;
        };
        number(&mut bytes, zigzag << 1 | 1);
        number(&mut bytes, region.len() as u64);
        for axis in region {
            number(&mut bytes, axis.start);
            number(&mut bytes, axis.end.wrapping_sub(axis.start));
            number(&mut bytes, axis.step);
        }
        next = i64::from(first.tensor) + 1;
        rest = &rest[1..];
    }
    bytes
}

/// The wants in these bytes. `tensors`: how many tensors there are.
///
/// # Errors
/// `Invalid` if they are none, or name a tensor that does not exist.
pub fn unpack(bytes: &[u8], tensors: u32) -> Result<Vec<Want>> {
    let mut wants = Vec::new();
    for group in groups(bytes, tensors) {
        match group? {
            Group::Whole(tensors) => wants.extend(tensors.map(Want::whole)),
            Group::Part(tensor, part) => wants.push(Want::part(tensor, region(part)?)),
        }
    }
    Ok(wants)
}

/// A group.
pub(super) enum Group<'a> {
    /// These tensors, whole.
    Whole(Range<u32>),
    /// A part of a tensor: the bytes that say which one.
    Part(u32, &'a [u8]),
}

/// The groups in these bytes. `tensors`: how many tensors there are. Errors are those of [`unpack`]; one is the last item.
pub(super) fn groups(bytes: &[u8], tensors: u32) -> impl Iterator<Item = Result<Group<'_>>> {
    let (mut rest, mut next) = (bytes, 0i64);
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let group = group(&mut rest, &mut next, tensors);
        if group.is_none() {
            rest = &[];
        }
        Some(group.ok_or_else(garbled))
    })
}

/// The first group of `rest`, which is left with the others. `next`: the tensor after the last group.
fn group<'a>(rest: &mut &'a [u8], next: &mut i64, tensors: u32) -> Option<Group<'a>> {
    let head = taken(rest)?;
    let distance = ((head >> 2) as i64) ^ -((head >> 1 & 1) as i64);
    let first =
        next.checked_add(distance).and_then(|first| u32::try_from(first).ok()).filter(|first| *first < tensors)?;
    if head & 1 == 0 {
        let count = u32::try_from(taken(rest)?).ok().filter(|count| *count > 0 && *count <= tensors - first)?;
        *next = i64::from(first + count);
        return Some(Group::Whole(first..first + count));
    }
    let part = *rest;
    let dimensions = taken(rest).filter(|dimensions| *dimensions <= DIMENSIONS)?;
    // The last byte of a number is less than 128.
    let ends = rest.iter().enumerate().filter(|byte| *byte.1 < 0x80).map(|byte| byte.0 + 1);
    let past = if dimensions == 0 { 0 } else { ends.take(3 * dimensions as usize).nth(3 * dimensions as usize - 1)? };
    *rest = &rest[past..];
    *next = i64::from(first) + 1;
    Some(Group::Part(first, &part[..part.len() - rest.len()]))
}

/// The region in the bytes of a part.
pub(super) fn region(mut part: &[u8]) -> Result<Vec<AxisSlice>> {
    let mut take = || taken(&mut part).ok_or_else(garbled);
    let dimensions = take()?;
    let mut axis = |_| {
        let (start, len, step) = (take()?, take()?, take()?);
        Ok(AxisSlice { start, end: start.wrapping_add(len), step })
    };
    (0..dimensions).map(&mut axis).collect()
}

fn garbled() -> Error {
    Error::new(ErrorKind::Invalid, "the wants of another rank arrived damaged")
}

fn number(bytes: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        bytes.push(n as u8 | 0x80);
        n >>= 7;
    }
    bytes.push(n as u8);
}

/// The first number.
fn taken(rest: &mut &[u8]) -> Option<u64> {
    let mut n = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, after) = rest.split_first()?;
        *rest = after;
        n |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(n);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn want() -> impl Strategy<Value = Want> {
        let axis = (0u64..1 << 40, 0u64..1 << 40, 1u64..9);
        let axis = axis.prop_map(|(start, len, step)| AxisSlice { start, end: start + len, step });
        (0u32..1000, proptest::option::of(proptest::collection::vec(axis, 0..4)))
            .prop_map(|(tensor, region)| Want { tensor, region: region.map(Vec::into_boxed_slice) })
    }

    proptest! {
        #[test]
        fn what_is_packed_is_unpacked(wants in proptest::collection::vec(want(), 0..40), whole in 0u32..1000) {
            let mut wants = wants;
            wants.extend((whole..1000).map(Want::whole));
            prop_assert_eq!(unpack(&pack(&wants), 1000).unwrap(), wants);
        }

        #[test]
        fn garbled_bytes_are_refused_or_name_tensors_that_exist(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Ok(wants) = unpack(&bytes, 50) {
                prop_assert!(wants.iter().all(|want| want.tensor < 50));
            }
        }
    }

    #[test]
    fn neighbours_are_one_group() {
        let wants: Vec<Want> = (0..371_474).map(Want::whole).collect();
        assert!(pack(&wants).len() < 8);
    }
}
