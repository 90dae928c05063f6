//! From what the user named to the shard files that it stands for.

use super::choose::{are_whole_beside, choose, is_candidate, missing_shards, ChosenNames, FolderRequest, ToOpen};
use super::join::listed;
use super::natural::natural;
use crate::error::{Error, ErrorKind, Result};
use crate::store::{Location, Origin, Watch};
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};

/// The thing that a source stands for.
#[derive(Debug, Clone)]
pub(super) struct Found {
    pub(super) what: What,
    /// The folder that was chosen from; `None` if the files were named.
    pub(super) folder: Option<ChosenFolder>,
}

/// The files to open.
#[derive(Debug, Clone)]
pub(super) enum What {
    /// Shard files, in natural order.
    Files(Vec<Origin>),
    /// An index, which names the files.
    Index(Origin),
}

/// A folder, and what was chosen of its names.
#[derive(Debug, Clone)]
pub(super) struct ChosenFolder {
    at: Origin,
    names: Vec<OsString>,
    asked: FolderRequest,
    /// Indexes that were passed over because none of their files is there.
    abandoned: Vec<OsString>,
    only_variant: Option<String>,
}

/// The files that `sources` stand for: one thing (shard file, directory, index) or a list of shard files.
pub(super) fn discover(sources: &[Origin], asked: &FolderRequest, watch: &Watch) -> Result<Found> {
    let named = |what| {
        if let (Some(variant), Some(source)) = (&asked.variant, sources.first()) {
            let text = format!("variant={variant:?} chooses among the files of a folder, and this is not one: omit it");
            return Err(Error::new(ErrorKind::Invalid, text).at(source.location()));
        }
        Ok(Found { what, folder: None })
    };
    match sources {
        [] => Err(Error::new(ErrorKind::Invalid, "no file, directory or index was given to open")),
        [one] if is_index(one) => named(What::Index(one.clone())),
        [one] => {
            let mut asked = asked.clone();
            let names = match asked.names.take() {
                Some(names) => names,
                None => match one.names(watch)? {
                    Some(names) => names,
                    None => return named(What::Files(vec![one.clone()])),
                },
            };
            ChosenFolder { at: one.clone(), names, asked, abandoned: Vec::new(), only_variant: None }.chosen()
        }
        many => named(What::Files(in_order(many.to_vec())?)),
    }
}

impl ChosenFolder {
    fn chosen(mut self) -> Result<Found> {
        let ChosenNames { open, only_variant } = choose(self.at.location(), &self.names, &self.asked, &self.abandoned)?;
        self.only_variant = only_variant;
        let what = match open {
            ToOpen::Index(name) => What::Index(self.at.within(&name)),
            ToOpen::Files(names) => What::Files(names.iter().map(|name| self.at.within(name)).collect()),
        };
        Ok(Found { what, folder: Some(self) })
    }

    /// The whole file, or set of shards, that is opened in place of this index, of whose files none is there. `None` if some
    /// are, or if nothing is whole by its name: other files may be a part of what is still to be fetched.
    pub(super) fn without(&self, index: &Origin, files: &[Origin], watch: &Watch) -> Result<Option<Found>> {
        let listed = |file: &Origin| self.names.iter().any(|name| self.at.within(name) == *file);
        if !self.asked.leftover || files.iter().any(listed) {
            return Ok(None);
        }
        if watch.is_here() {
            return Err(watch.too_much());
        }
        if !files.iter().all(|file| !watch.is_given_up() && file.is_gone(watch)) {
            return Ok(None);
        }
        let mut other = self.clone();
        let index = index.location().file_name();
        other.abandoned.push(index.to_owned());
        let whole = |found: &Found| {
            let What::Files(files) = &found.what else { return false };
            let names: Vec<_> = files.iter().map(|file| file.location().file_name().to_string_lossy()).collect();
            are_whole_beside(&names.iter().map(|name| &**name).collect::<Vec<_>>(), &index.to_string_lossy())
        };
        Ok(other.chosen().ok().filter(whole))
    }

    /// The warnings about the choice, after `files` and perhaps an index were opened.
    pub(super) fn warnings(&self, files: &[Origin], index: Option<&Origin>) -> Vec<String> {
        let at = self.at.location();
        let opened: HashSet<&OsStr> = files.iter().chain(index).map(|one| one.location().as_os_str()).collect();
        let mut warnings = Vec::new();
        if let Some(variant) = &self.only_variant {
            warnings.push(format!(
                "{at}: there is only the variant {variant:?}, which was opened; variant={variant:?} asks for it"
            ));
        }
        for index in &self.abandoned {
            warnings.push(format!(
                "{at}: {}: passed over, because none of its shard files is here",
                index.to_string_lossy()
            ));
        }
        let mut passed: Vec<&OsString> = self.names.iter().filter(|n| is_candidate(&n.to_string_lossy())).collect();
        passed.retain(|name| {
            !opened.contains(self.at.within(name).location().as_os_str()) && !self.abandoned.contains(name)
        });
        passed.sort_by(|a, b| natural(a, b));
        if !passed.is_empty() {
            let what = match (index, files) {
                (Some(index), _) => index.location().file_name().to_string_lossy().into_owned(),
                (None, [one]) => one.location().file_name().to_string_lossy().into_owned(),
                (None, many) => format!("{} shard files", many.len()),
            };
            let names = listed(passed.iter().map(|n| n.to_string_lossy().into_owned()), passed.len());
            warnings.push(format!("{at}: {what} was opened, and this was passed over: {names}"));
        }
        warnings
    }
}

/// A list of shard files, in natural order. Refuses an index and a file that is there twice.
fn in_order(mut files: Vec<Origin>) -> Result<Vec<Origin>> {
    if let Some(index) = files.iter().find(|f| is_index(f)) {
        return Err(Error::new(
            ErrorKind::Invalid,
            "the list has an index among its files: give the index alone (it names its files), or the shard files without it",
        )
        .at(index.location()));
    }
    files.sort_by(|a, b| natural(a.location().as_os_str(), b.location().as_os_str()));
    if let Some(twice) = files.windows(2).find(|w| w[0] == w[1]) {
        return Err(Error::new(ErrorKind::Invalid, "this file is in the list twice").at(twice[0].location()));
    }
    Ok(files)
}

fn is_index(origin: &Origin) -> bool {
    origin.location().ending() == Some("json")
}

/// The names that are opened of the names in a folder, or under an address, `place`: those of shard files in natural order,
/// or that of one index, which names the files.
///
/// # Errors
/// `NotFound` if there is no checkpoint; `Index` if there are several.
pub fn to_open(place: &str, names: &[OsString], asked: &FolderRequest) -> Result<Vec<OsString>> {
    let place = Location::file(OsStr::new(place));
    Ok(match choose(&place, names, asked, &[])?.open {
        ToOpen::Index(name) => vec![name],
        ToOpen::Files(names) => names,
    })
}

/// The warning of sets of shard files whose names say `-00001-of-00003` although not all three are there.
pub(super) fn incomplete_sets(files: &[Origin]) -> Option<String> {
    let names: Vec<_> = files.iter().map(|file| file.location().file_name().to_string_lossy()).collect();
    let missing = missing_shards(&names);
    let count = missing.len();
    let (them, are) = if count == 1 { ("it", "is") } else { ("them", "are") };
    (count > 0).then(|| {
        format!(
            "by the names of the shard files, {count} more {are} missing, and this checkpoint lacks the tensors in {them}: {}",
            listed(missing.into_iter(), count)
        )
    })
}
