//! The inbox, the state and the condition variable that a load's owner and its engine thread share.

use crate::device::Fence;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Checkpoint;
use crate::memory::Block;
use crate::plan::layout::Layout;
use crate::stats::Report;
use crate::sync::{lock, Condvar, Mutex, MutexGuard};
use crate::wake::Wake;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// Every error names a file. An error that concerns no file in particular, such as a missing GPU, names the first file
/// of the checkpoint.
pub(super) fn somewhere(error: Error, checkpoint: &Checkpoint) -> Error {
    match checkpoint.files().first() {
        Some(file) => error.at(&file.spelled),
        None => error,
    }
}

/// The error of a mistake in this crate.
pub(super) fn internal(text: &str) -> Error {
    Error::new(ErrorKind::Internal, format!("{text}; please report this"))
}

/// State shared by a load's owner and its engine thread.
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    pub(super) inbox: Inbox,
}

/// The wake-up of the engine thread for a message. Its descriptor is closed when the load has ended, because an owner may
/// keep an ended load as long as the process lives.
pub(super) struct Inbox(Mutex<Option<Arc<Wake>>>);

impl Inbox {
    pub(super) fn new() -> Result<Self> {
        Ok(Self(Mutex::new(Some(Arc::new(Wake::new()?)))))
    }

    /// `None` once the load has ended: nobody reads messages then.
    fn wake(&self) -> Option<Arc<Wake>> {
        lock(&self.0).clone()
    }

    /// The descriptor to wait on, for the engine thread, which ends the load itself; -1 afterwards.
    pub(super) fn fd(&self) -> RawFd {
        self.wake().map_or(-1, |wake| wake.fd())
    }

    pub(super) fn notify(&self) {
        if let Some(wake) = self.wake() {
            wake.notify();
        }
    }

    fn clear(&self) {
        if let Some(wake) = self.wake() {
            wake.clear();
        }
    }

    fn close(&self) {
        let closed = lock(&self.0).take();
        drop(closed);
    }
}

#[derive(Default)]
pub(super) struct State {
    pub(super) messages: Vec<Message>,
    /// Wants in hand-out order that the owner has not asked for yet (streams only).
    pub(super) ready: VecDeque<u32>,
    /// Wants that the owner was given and did not take yet.
    pub(super) handed: Vec<u32>,
    /// Blocks that the owner is asked to grant.
    pub(super) wanted: Vec<u32>,
    pub(super) arrived: u64,
    pub(super) blocks: Vec<Option<Block>>,
    pub(super) granted: Vec<bool>,
    pub(super) viewed: Vec<bool>,
    /// Wants per block that were not handed out yet. After the last one, the load no longer holds the block.
    pub(super) unviewed: Vec<u32>,
    pub(super) touched: Vec<u32>,
    pub(super) outcome: Option<Result<()>>,
    pub(super) report: Report,
}

/// From the owner to the engine thread.
pub(super) enum Message {
    Grant(u32, Block, Option<Fence>),
    Take(u32),
    Cancel,
}

impl State {
    pub(super) fn is_granted(&self, block: u32) -> bool {
        self.granted[block as usize]
    }

    /// The block's memory has been granted.
    pub(super) fn give(&mut self, block: u32, memory: Block) {
        self.granted[block as usize] = true;
        // If only empty wants lay in the block and all of them are handed out, nothing will ask for it.
        if self.unviewed[block as usize] > 0 {
            self.blocks[block as usize] = Some(memory);
        }
    }
}

impl Shared {
    pub(super) fn new(layout: &Layout, blocks: Vec<Option<Block>>) -> Result<Self> {
        let state = State {
            granted: blocks.iter().map(Option::is_some).collect(),
            blocks,
            viewed: vec![false; layout.places.len()],
            unviewed: layout.wants_per_block(),
            ..State::default()
        };
        Ok(Shared { state: Mutex::new(state), changed: Condvar::new(), inbox: Inbox::new()? })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn tell(&self, message: Message) {
        self.lock().messages.push(message);
        self.inbox.notify();
    }

    /// The state, with every message sent until now. A later message notifies the inbox again.
    pub(super) fn with_news(&self) -> MutexGuard<'_, State> {
        // Clear first, then look.
        self.inbox.clear();
        self.lock()
    }

    /// Ends the load for all threads that wait for it.
    pub(super) fn end(&self, outcome: Result<()>) {
        let mut state = self.lock();
        state.wanted.clear();
        state.outcome = Some(outcome);
        // A grant that arrived while the load ended holds the owner's memory. Nothing reads it now.
        let unread = std::mem::take(&mut state.messages);
        self.changed.notify_all();
        drop(state);
        drop(unread);
        self.inbox.close();
    }

    /// Waits until `found` finds something in the state, and returns that; `None` if `timeout` passes first.
    pub(super) fn wait_until<T>(
        &self,
        timeout: Option<Duration>,
        mut found: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        let mut state = self.lock();
        loop {
            if let Some(result) = found(&mut state) {
                return Some(result);
            }
            state = match deadline {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.checked_duration_since(Instant::now()).filter(|d| !d.is_zero())?;
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

/// The engine thread's end of [`Shared`].
pub(super) struct OwnerLink {
    pub(super) shared: Arc<Shared>,
    /// The owner takes wants one by one.
    pub(super) stream: bool,
    /// The engine has heard that the owner wants the load to end.
    pub(super) cancelled: bool,
    /// Bytes arrived, as the owner was told last.
    pub(super) told: u64,
}

impl OwnerLink {
    /// True if an unread message of the owner ends the load.
    pub(super) fn cancels(&self) -> bool {
        self.shared.lock().messages.iter().any(|message| matches!(message, Message::Cancel))
    }

    /// Tells the owner the news: wants ready, blocks wanted, bytes arrived.
    pub(super) fn tell(&mut self, ready: Vec<u32>, mut wanted: Vec<u32>, arrived: u64) {
        if ready.is_empty() && arrived == self.told && wanted.is_empty() {
            return;
        }
        self.told = arrived;
        let mut state = self.shared.lock();
        // A grant may have come in since the engine looked.
        wanted.retain(|&b| !state.is_granted(b));
        let news = !ready.is_empty() || (!wanted.is_empty() && wanted != state.wanted);
        state.ready.extend(ready);
        state.wanted = wanted;
        state.arrived = arrived;
        if news {
            self.shared.changed.notify_all();
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::sync::Builder;

    #[test]
    fn the_engine_thread_hears_every_message_and_its_end_is_heard() {
        loom::model(|| {
            let shared =
                Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), inbox: Inbox::new().unwrap() });
            let engine = shared.clone();
            let thread = Builder::new().spawn(move || {
                let (mut taken, mut cancelled) = (0, false);
                while !(taken == 1 && cancelled) {
                    for message in std::mem::take(&mut engine.with_news().messages) {
                        match message {
                            Message::Take(_) => taken += 1,
                            _ => cancelled = true,
                        }
                    }
                    if !(taken == 1 && cancelled) {
                        let wake = engine.inbox.wake().unwrap();
                        wake.wait(-1);
                    }
                }
                engine.end(Ok(()));
            });
            shared.tell(Message::Take(0));
            shared.tell(Message::Cancel);
            assert!(shared.wait_until(None, |state| state.outcome.clone()).is_some());
            thread.unwrap().join().unwrap();
        });
    }
}
