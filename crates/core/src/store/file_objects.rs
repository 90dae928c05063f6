//! Files of this machine, as the objects of a load.

use super::facts::Facts;
use super::files::Files;
use super::location::Location;
use super::object::{Object, Objects};
use super::questions::Questions;
use super::read_cost::{self, Sample};
use super::residency::Residency;
use super::version::{Identity, Version};
use crate::error::{Error, ErrorKind, Result};
use crate::source::{LaneSource, Router, SourceRequest, Trial};
use crate::way::Cold;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

/// These objects as files, by their number; nothing is opened yet.
///
/// # Errors
/// `Unsupported` if one is in a store of a scheme.
pub(crate) fn local_files(objects: impl IntoIterator<Item = Option<Object>>) -> Result<Files> {
    let file = |object: Option<Object>| match object {
        Some(object) => local_file(&object).map(|(path, identity)| (path.to_path_buf(), *identity)),
        // Never asked about.
        None => Ok(Default::default()),
    };
    Ok(Files::new(objects.into_iter().map(file).collect::<Result<Vec<_>>>()?))
}

/// An object as a file of this machine.
pub(super) fn local_file(object: &Object) -> Result<(&Path, &Identity)> {
    match (&object.location, &object.version) {
        (Location::Path(path), Version::Inode(identity)) => Ok((path, identity)),
        (at, _) => Err(Error::new(ErrorKind::Unsupported, "this works with files of this machine only").at(at)),
    }
}

impl Objects for Files {
    fn path(&self, file: u32) -> &Path {
        Files::path(self, file)
    }

    fn facts(&self, file: u32) -> Result<Facts> {
        Files::facts(self, file)
    }

    fn resident_within(&self, file: u32, range: Range<u64>) -> Result<Residency> {
        Files::resident_within(self, file, range)
    }

    fn hole(&self, file: u32, direct: bool, sample: &Sample) -> Result<Option<u64>> {
        let dev = self.identity(file).dev;
        if let Some(found) = read_cost::known(dev, direct) {
            return Ok(Some(found));
        }
        // What cannot be opened in this way is for the load to find another way for, or to report.
        let Ok(fd) = self.open(file, direct) else { return Ok(None) };
        let _asking = self.questions.ask(file);
        let answered = || _ = self.questions.answered();
        Ok(read_cost::measure(fd.as_raw_fd(), dev, direct, sample, &answered))
    }

    fn to_map(&self, file: u32) -> Result<Option<Arc<OwnedFd>>> {
        self.open(file, false).map(Some)
    }

    fn verify(&self, file: u32) -> Result<()> {
        self.verify_file(file)
    }

    fn may_hang(&self) -> bool {
        Files::may_hang(self)
    }

    fn are_known_local(&self) -> bool {
        Files::are_known_local(self)
    }

    fn questions(&self) -> Option<&Questions> {
        Some(&self.questions)
    }

    fn sources(self: Arc<Self>, request: &SourceRequest) -> Result<Vec<LaneSource>> {
        let SourceRequest { io, routing, timeline, chosen, .. } = request;
        let router = Router::recorded(self.clone(), *io, routing, timeline.as_ref())?;
        Ok(vec![match routing.cold {
            Cold::Try => LaneSource::of_all(Trial::new(router.late(), router, self, chosen.clone())),
            _ => LaneSource::of_all(router),
        }])
    }

    #[cfg(any(test, feature = "testing"))]
    fn pretend_storage(&self, file: u32, storage: u64) -> Result<()> {
        Files::pretend_storage(self, file, storage)
    }
}
