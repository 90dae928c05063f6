//! The sentences of a report about the service: it has no guard against a second writer, keeps old versions, or locks them.

use super::before::{has_done_nothing, Before};
use super::names::new_tag;
use super::shared::SaveShared;
use crate::error::Result;
use crate::fallback::Fallback;
use crate::store::upload::{ConditionTrial, Removal, UploadWatch, Uploads};
use crate::store::Location;
use std::ffi::OsStr;

/// See the module's documentation.
pub(super) struct ServiceReport<'a> {
    pub(super) uploads: &'a dyn Uploads,
    pub(super) shared: &'a SaveShared,
    pub(super) watch: &'a dyn UploadWatch,
}

/// The guard of a new checkpoint against a second writer.
pub(super) enum WriterGuard<'a> {
    /// A condition of the request that made it visible, which was one of an upload in parts or not.
    Condition { in_parts: bool },
    /// None: nobody said what was at this address.
    Unasked(&'a Location),
    /// None: the service refused a condition because of an object that had been removed.
    Dropped,
}

impl ServiceReport<'_> {
    /// Tells if nothing guards the new checkpoint against a second writer.
    pub(super) fn tell_of_guard(&self, folder: &Location, guard: &WriterGuard<'_>) {
        let unnoticed = "so a second save to this address at the same time is not noticed";
        let (to, reason) = match guard {
            WriterGuard::Unasked(at) => {
                let at = at.as_path().display();
                let why = format!(
                    "without the right to list the prefix or to look at {at} it was written without a condition"
                );
                ("none", format!("{why}, {unnoticed}"))
            }
            WriterGuard::Dropped => {
                let why = "this service counts a removed object as one that is there, because it keeps its versions. The object was \
                           written without a condition, after the service had said that its newest version is a removal";
                ("a question before the request", format!("{why}: a save that ends between the two is not noticed"))
            }
            WriterGuard::Condition { in_parts } => match self.heeds_conditions(folder, *in_parts) {
                Ok(true) => return,
                Ok(false) => {
                    let of = if *in_parts { ", at the end of an upload in parts" } else { "" };
                    ("none", format!("this service ignores the conditions of requests (If-Match{of}), {unnoticed}"))
                }
                Err(e) => {
                    let why = "whether this service keeps to the conditions of requests (If-Match)";
                    ("not known", format!("{why} was not answered: {}", e.message()))
                }
            },
        };
        self.shared.add_fallback(Fallback { from: "guard against a second writer", to, reason });
    }

    /// True if the service keeps to conditions. Nothing of the question stays, or it is told.
    fn heeds_conditions(&self, folder: &Location, in_parts: bool) -> Result<bool> {
        let probe = folder.within(OsStr::new(&format!(".penstock-{}", new_tag())));
        let ConditionTrial { heeds, incomplete } = self.uploads.heeds_conditions(&probe, in_parts, self.watch);
        let name = probe.as_path().display();
        let tell =
            |to, reason| self.shared.add_fallback(Fallback { from: "removing a trial of conditions", to, reason });
        if let Some(e) = incomplete {
            tell("leaving it", format!("an upload of one byte to {name} stays incomplete: {}", e.message()));
        }
        let may_stay = match &heeds {
            Ok(heeds) => !heeds,
            Err(e) => !has_done_nothing(e),
        };
        match may_stay.then(|| self.uploads.remove(&probe, self.watch)) {
            Some(Err(e)) => tell("leaving it", format!("{name} stays, with one byte at most: {}", e.message())),
            Some(Ok(Removal::Hidden)) => {
                let stays = if heeds.is_ok() { "stays" } else { "may stay" };
                let reason = format!("the bucket keeps versions: {name} {stays} as an old one, with one byte at most");
                tell("an old version", reason);
            }
            Some(Ok(Removal::Done)) | None => {}
        }
        heeds
    }

    /// Tells if the bucket keeps versions of what was replaced, and if it locks `new`.
    pub(super) fn tell_of_versions(&self, new: &Location, shows_versions: bool, before: &Before) {
        // A question without an answer is no lock that could be told.
        let lock = shows_versions.then(|| self.uploads.lock(new, self.watch).ok().flatten()).flatten();
        if let Some(lock) = &lock {
            let reason = format!(
                "object lock keeps what this save has written from being deleted ({lock}): to replace or to remove an object \
                 hides its version, and the bytes stay"
            );
            self.shared.add_fallback(Fallback { from: "objects that can be deleted", to: "locked versions", reason });
        }
        let Some((at, version)) = [&before.index, &before.single].into_iter().flatten().next() else { return };
        let is_kept = |version: &str| matches!(self.uploads.keeps_version(at, version, self.watch), Ok(true));
        if !shows_versions && !version.as_deref().is_some_and(is_kept) {
            return;
        }
        let until = match (&before.lock, &lock) {
            (Some(lock), _) => format!(", and nobody can delete those as long as object lock keeps them ({lock})"),
            (None, Some(lock)) => {
                format!(". New objects are locked ({lock}); whether the old ones are, no answer says")
            }
            (None, None) => {
                ", until a lifecycle rule removes those. A lock on them would delay that; the answers show none"
                    .to_owned()
            }
        };
        let reason = format!("the bucket keeps versions: objects that are replaced or removed stay as old ones{until}");
        let from = "removing the earlier checkpoint";
        self.shared.add_fallback(Fallback { from, to: "old versions stay", reason });
    }
}
