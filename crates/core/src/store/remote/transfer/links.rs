//! The connections of a load, by number, and how many are in which state.

use super::link::{Link, LinkState};

/// See the module's documentation.
pub(super) struct Links<S> {
    slots: Vec<Option<Link<S>>>,
    /// How many there are in each state.
    counts: [usize; LinkState::ALL],
}

impl<S> Default for Links<S> {
    fn default() -> Self {
        Links { slots: Vec::new(), counts: [0; LinkState::ALL] }
    }
}

impl<S> Links<S> {
    /// How many there are, without one that was taken out.
    pub(super) fn len(&self) -> usize {
        self.counts.iter().sum()
    }

    /// How many of them are in this state.
    pub(super) fn count(&self, state: LinkState) -> usize {
        self.counts[state as usize]
    }

    /// A number for one more.
    pub(super) fn room(&mut self) -> usize {
        if self.len() == self.slots.len() {
            self.slots.push(None);
        }
        self.slots.iter().position(Option::is_none).unwrap_or_default()
    }

    pub(super) fn put(&mut self, number: usize, link: Link<S>) {
        self.counts[link.state as usize] += 1;
        self.slots[number] = Some(link);
    }

    pub(super) fn take(&mut self, number: usize) -> Option<Link<S>> {
        let link = self.slots.get_mut(number)?.take()?;
        self.counts[link.state as usize] -= 1;
        Some(link)
    }

    /// Takes it out if there is one, and `is_it` holds for it.
    pub(super) fn take_if(&mut self, number: usize, is_it: impl Fn(&Link<S>) -> bool) -> Option<Link<S>> {
        self.slots.get(number)?.as_ref().filter(|link| is_it(link))?;
        self.take(number)
    }

    /// Takes out the last one for which `is_it` holds, and says its number.
    pub(super) fn take_where(&mut self, is_it: impl Fn(&Link<S>) -> bool) -> Option<(usize, Link<S>)> {
        let number = self.slots.iter().rposition(|slot| slot.as_ref().is_some_and(&is_it))?;
        self.take(number).map(|link| (number, link))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &Link<S>)> {
        self.slots.iter().enumerate().filter_map(|(number, slot)| Some((number, slot.as_ref()?)))
    }

    /// To change what is asked on them, not their state.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (usize, &mut Link<S>)> {
        self.slots.iter_mut().enumerate().filter_map(|(number, slot)| Some((number, slot.as_mut()?)))
    }
}
