//! The wants of each rank, in a form that is small and quick to make: a rank may want hundreds of thousands of
//! tensors, and every rank keeps the lists of all.
//!
//! The tensors of a model have few kinds (dtype and shape), and ranks cut those of one kind in few ways. So most wants are one
//! of few patterns: runs counted from the first byte of the tensor.

use super::packed::{self, Group};
use super::want::{Runs, Want};
use crate::error::Result;
use crate::format::{Checkpoint, DType};
use hashbrown::HashMap;
use std::borrow::Cow;
use std::ops::Range;

/// A list of wants, or the bytes that say what it is.
pub trait ListOfWants {
    /// As [`packed::pack`] gives it.
    fn packed(&self) -> Cow<'_, [u8]>;
}

impl ListOfWants for Vec<Want> {
    fn packed(&self) -> Cow<'_, [u8]> {
        packed::pack(self).into()
    }
}

impl ListOfWants for &[u8] {
    fn packed(&self) -> Cow<'_, [u8]> {
        (*self).into()
    }
}

/// The wants of one rank, or of several alike.
#[derive(Debug, Clone)]
pub(super) struct List {
    /// For each want: its tensor, and the number of its pattern.
    wants: Vec<(u32, u32)>,
    /// The numbers of the wants in order of their tensors, where they are not in that order.
    sorted: Option<Vec<u32>>,
    /// The ranks that have this list, ascending.
    pub(super) ranks: Box<[u32]>,
}

impl List {
    /// Tensor and pattern of a want.
    pub(super) fn want(&self, number: u32) -> (u32, u32) {
        self.wants[number as usize]
    }

    /// How many wants there are.
    pub(super) fn len(&self) -> usize {
        self.wants.len()
    }

    /// The number of the want that is at this place in the order of the tensors.
    pub(super) fn in_order(&self, place: usize) -> u32 {
        self.sorted.as_ref().map_or(place as u32, |sorted| sorted[place])
    }

    /// The numbers of the wants of these tensors, in order of the tensors, then of the wants.
    pub(super) fn of(&self, tensors: Range<u32>) -> impl Iterator<Item = u32> + '_ {
        let place = |tensor: u32| match &self.sorted {
            None => self.wants.partition_point(|want| want.0 < tensor),
            Some(sorted) => sorted.partition_point(|&want| self.wants[want as usize].0 < tensor),
        };
        (place(tensors.start)..place(tensors.end)).map(|place| self.in_order(place))
    }
}

/// The patterns of all lists, and where each tensor begins.
#[derive(Debug, Clone)]
pub(super) struct Patterns {
    runs: Vec<Runs>,
    begin: Vec<u64>,
}

impl Patterns {
    /// The runs of a pattern, from the first byte of a tensor.
    pub(super) fn runs(&self, pattern: u32) -> &Runs {
        &self.runs[pattern as usize]
    }

    /// The first byte of a tensor, in its file.
    pub(super) fn begin(&self, tensor: u32) -> u64 {
        self.begin[tensor as usize]
    }
}

/// A reader of lists.
pub(super) struct Reading<'a> {
    checkpoint: &'a Checkpoint,
    patterns: Patterns,
    /// The kind of each tensor.
    kinds: Vec<u32>,
    /// For each kind: the pattern of the whole tensor, and those of its parts by the bytes that say which part it is.
    whole: Vec<Option<u32>>,
    parts: Vec<HashMap<Box<[u8]>, u32>>,
}

impl<'a> Reading<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint) -> Reading<'a> {
        let mut known: HashMap<(DType, &[u64]), u32> = HashMap::new();
        let mut patterns = Patterns { runs: Vec::new(), begin: Vec::with_capacity(checkpoint.len()) };
        let mut kinds = Vec::with_capacity(checkpoint.len());
        for tensor in checkpoint.tensors() {
            let next = known.len() as u32;
            kinds.push(*known.entry((tensor.dtype, tensor.shape)).or_insert(next));
            patterns.begin.push(tensor.begin);
        }
        let parts = known.iter().map(|_| HashMap::new()).collect();
        Reading { checkpoint, patterns, kinds, whole: vec![None; known.len()], parts }
    }

    /// Reads a list.
    ///
    /// # Errors
    /// The errors of [`Runs::of`] and of [`packed::unpack`].
    pub(super) fn list(&mut self, packed: &[u8], ranks: Box<[u32]>) -> Result<List> {
        let mut wants: Vec<(u32, u32)> = Vec::new();
        // Many tensors after each other are cut alike.
        let mut last: Vec<(&[u8], u32)> = vec![(&[], 0); self.parts.len()];
        for group in packed::groups(packed, self.kinds.len() as u32) {
            match group? {
                Group::Whole(tensors) => {
                    wants.reserve(tensors.len());
                    for tensor in tensors {
                        wants.push((tensor, self.of_whole(tensor)?));
                    }
                }
                Group::Part(tensor, part) => {
                    let kind = self.kinds[tensor as usize] as usize;
                    if last[kind].0 != part {
                        last[kind] = (part, self.of_part(tensor, part)?);
                    }
                    wants.push((tensor, last[kind].1));
                }
            }
        }
        let sorted = (!wants.is_sorted_by_key(|want| want.0)).then(|| {
            let mut sorted: Vec<u32> = (0..wants.len() as u32).collect();
            sorted.sort_by_key(|&want| wants[want as usize].0);
            sorted
        });
        Ok(List { wants, sorted, ranks })
    }

    /// The patterns found.
    pub(super) fn patterns(self) -> Patterns {
        self.patterns
    }

    fn of_whole(&mut self, tensor: u32) -> Result<u32> {
        let kind = self.kinds[tensor as usize] as usize;
        if let Some(known) = self.whole[kind] {
            return Ok(known);
        }
        let found = self.pattern(&Want::whole(tensor))?;
        self.whole[kind] = Some(found);
        Ok(found)
    }

    fn of_part(&mut self, tensor: u32, part: &[u8]) -> Result<u32> {
        let kind = self.kinds[tensor as usize] as usize;
        if let Some(known) = self.parts[kind].get(part) {
            return Ok(*known);
        }
        let region = packed::region(part)?;
        let found = self.pattern(&Want::part(tensor, region))?;
        self.parts[kind].insert(part.into(), found);
        Ok(found)
    }

    fn pattern(&mut self, want: &Want) -> Result<u32> {
        let mut runs = Runs::of(self.checkpoint, want)?;
        runs.start -= self.patterns.begin(want.tensor);
        self.patterns.runs.push(runs);
        Ok(self.patterns.runs.len() as u32 - 1)
    }
}
