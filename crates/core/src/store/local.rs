//! Files of this machine, as the objects of a load.

use super::facts::Facts;
use super::files::Files;
use super::object::Objects;
use super::residency::Residency;
use crate::error::Result;
use crate::source::{LaneSource, Router, SourceRequest, Trial};
use crate::way::Cold;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

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

    fn to_map(&self, file: u32) -> Result<Option<Arc<OwnedFd>>> {
        self.open(file, false).map(Some)
    }

    fn verify(&self, file: u32) -> Result<()> {
        self.verify_file(file)
    }

    fn may_hang(&self) -> bool {
        Files::may_hang(self)
    }

    fn sources(self: Arc<Self>, request: &SourceRequest) -> Result<Vec<LaneSource>> {
        let SourceRequest { io, routing, timeline, chosen } = request;
        let router = Router::recorded(self.clone(), *io, routing, timeline.as_ref())?;
        Ok(vec![match routing.cold {
            Cold::Try => LaneSource::of_all(Trial::new(router.late(), router, self, chosen.clone())),
            _ => LaneSource::of_all(router),
        }])
    }
}
