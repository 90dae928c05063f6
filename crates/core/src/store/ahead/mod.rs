//! Reads of one tensor, or a part of one, at a time from file systems that answer late.
//!
//! A load that reads one tensor costs an open, some questions and a request, and waits for each. Here descriptors stay
//! open ([`Kept`]), and what a caller will ask for next is read before it does: in the order that it shows ([`sequence`]),
//! within a limit of bytes ([`blocks`]). Threads read blocks of 256 KiB, several at once. A caller waits for its own
//! blocks and copies out of them; long ranges are read to where they belong. So no thread but these waits in the kernel,
//! and every wait of a caller ends.
//!
//! A file is compared with its identity when it is opened, once for each window that was read, and before bytes are handed
//! out that were read more than a moment ago.

mod blocks;
mod crew;
mod fetch;
mod queues;
mod sequence;

use self::blocks::Blocks;
pub use self::crew::stop_reading_ahead;
use self::fetch::CallerRead;
pub(crate) use self::queues::FileRange;
use self::queues::{Crew, Queues, MOST_THREADS, RUNNING};
use super::kept::Kept;
use crate::error::Result;
use crate::memory::Buffer;
use crate::sync::{lock, Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Reads of one handle. Threads may share it. It belongs to the process that made it.
pub(crate) struct Ahead(Arc<Crew>);

impl Ahead {
    /// Reads of these files. `most`: bytes of blocks. `threads`: reads at once; 0: as many as are of use. `stall`: how long
    /// no answer counts as a file system that hangs.
    pub(crate) fn new(kept: Arc<Kept>, most: u64, threads: u32, stall: Duration) -> Ahead {
        let state = Queues {
            window: Blocks::new(most),
            wanted: VecDeque::new(),
            ahead: VecDeque::new(),
            threads: 0,
            idle: 0,
            answers: 0,
            looked: HashMap::new(),
            released: false,
            stopping: 0,
            callers: 0,
        };
        let most_threads = if threads == 0 { MOST_THREADS } else { (threads as usize).min(MOST_THREADS) };
        let (work, done) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Crew {
            kept,
            stall,
            most_threads,
            state: Mutex::new(state),
            work,
            done,
            #[cfg(test)]
            looks: Mutex::default(),
        });
        let mut running = lock(RUNNING.get());
        running.retain(|one| one.strong_count() > 0);
        running.push(Arc::downgrade(&shared));
        Ahead(shared)
    }

    /// Bytes of blocks that were read ahead, or are about to be.
    pub(crate) fn held(&self) -> u64 {
        lock(&self.0.state).window.held()
    }

    /// Lets go of the blocks and of the descriptors. Later requests read nothing ahead.
    pub(crate) fn release(&self) {
        let mut state = lock(&self.0.state);
        state.released = true;
        state.ahead.clear();
        state.window.clear(None);
        drop(state);
        self.0.work.notify_all();
        self.0.kept.close_all();
    }

    /// The bytes of these parts of a file, one after the other, in memory of their own. `data`: where the tensors of the file
    /// are. `None`: they are too many for this.
    ///
    /// # Errors
    /// The errors of opening and reading; `Changed`; `Timeout` if nothing is answered for long; `Cancelled` if `go_on` says no.
    pub(crate) fn fetch(
        &self,
        file: u32,
        parts: impl Iterator<Item = FileRange> + Clone,
        nbytes: u64,
        data: Range<u64>,
        go_on: &mut (dyn FnMut() -> bool + Send),
    ) -> Result<Option<Arc<Buffer>>> {
        let mut asked = CallerRead::new(&self.0, file, nbytes, data)?;
        if nbytes == 0 {
            return Ok(Some(asked.memory));
        }
        lock(&self.0.state).callers += 1;
        let read = match asked.plan(parts.clone()) {
            Ok(true) => {
                let waited = asked.wait(go_on);
                let taken = asked.take(waited.is_ok());
                waited.and(taken).map(|()| true)
            }
            Ok(false) => Ok(false),
            Err(e) => asked.take(false).and(Err(e)),
        };
        if matches!(read, Ok(true)) {
            asked.copy(parts);
        }
        let mut state = lock(&self.0.state);
        state.callers -= 1;
        if state.released {
            state.window.clear(Some(file));
            if state.callers == 0 {
                drop(state);
                self.0.kept.close_all();
            }
        }
        Ok(read?.then_some(asked.memory))
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
