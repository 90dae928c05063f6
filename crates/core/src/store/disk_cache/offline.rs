//! The source in place of a server's, where no server may be asked: every read fails.

use crate::error::{Error, ErrorKind, Result};
use crate::source::{Done, Progress, Read, Source};
use crate::wake::Wake;
use std::ops::Range;
use std::os::fd::RawFd;

/// The error of a load that may ask no server.
pub(super) fn not_there(range: &Range<u64>) -> Error {
    let text = "the disk cache does not have this, and offline=True asks no server";
    Error::new(ErrorKind::NotFound, text).range(range.clone())
}

/// See above.
pub(super) struct Unasked {
    ended: Vec<Done>,
    wake: Wake,
}

impl Unasked {
    pub(super) fn new() -> Result<Unasked> {
        Ok(Unasked { ended: Vec::new(), wake: Wake::new()? })
    }
}

impl Source for Unasked {
    fn submit(&mut self, read: Read) -> Result<(), Read> {
        let error = not_there(&(read.offset..read.offset + read.need));
        self.ended.push(read.failed(error));
        self.wake.notify();
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }

    fn poll(&mut self, events: &mut Vec<Progress>) -> Result<()> {
        self.wake.clear();
        events.extend(self.ended.drain(..).map(Progress::Done));
        Ok(())
    }

    fn cancel(&mut self) {}

    fn wake(&self) -> RawFd {
        self.wake.fd()
    }

    fn in_flight(&self) -> usize {
        self.ended.len()
    }
}
