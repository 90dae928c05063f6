//! The source in place of a server's, where no server may be asked: every read fails.

use super::store::not_there;
use crate::error::Result;
use crate::source::{Done, Progress, Read, Source};
use crate::wake::Wake;
use std::os::fd::RawFd;

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
