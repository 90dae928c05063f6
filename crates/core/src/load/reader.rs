//! Reads of one tensor, or one part of a tensor, at a time, for a caller that asks in a loop: no plan, no engine, and
//! no memory for a whole load.
//!
//! On file systems that answer late, the next bytes are read ahead (`store/ahead`). On disks of this machine, a small
//! part that is in the page cache is copied out of it. Everything else is a [`Load`](super::Load), which the caller
//! starts when [`Reader::read`] gives nothing.

use crate::detached::{detached, here};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Checkpoint;
use crate::memory::{Buffer, View};
use crate::options::{Cache, Io, Options, LEAST_GAP, MIB};
use crate::plan::want::{Runs, Want};
use crate::store::{Ahead, FileRange, FsKind, Kept, Objects, Questions};
use crate::sync::Mutex;
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock, TryLockError};
use std::time::Duration;

/// Most bytes of blocks that are kept for one handle, if its window is larger.
const MOST_HELD: u64 = 256 * MIB;
/// The largest part that is copied out of the page cache here. A load of more costs less than its bytes.
const MOST_COPIED: u64 = MIB;
/// Ranges of a file that such a part may have, and calls that they take. A load is as good for more of them.
const MOST_RANGES: u64 = 512;

/// How often a thread looks whether another one has opened a file.
const MOMENT: Duration = Duration::from_micros(500);

/// Reads tensors of a checkpoint one at a time. Threads may share it; a forked child makes its own.
pub struct Reader {
    checkpoint: Arc<Checkpoint>,
    options: Options,
    pid: u32,
    files: Option<ManuallyDrop<ReaderFiles>>,
}

struct ReaderFiles {
    kept: Arc<Kept>,
    ahead: Ahead,
    kinds: Vec<FileKind>,
}

/// The kind of storage of a file, once it was opened.
#[derive(Default)]
struct FileKind {
    known: OnceLock<FsKind>,
    /// A thread opens it.
    opening: Mutex<()>,
}

impl Reader {
    /// Reads of this checkpoint with these options. Nothing is opened yet.
    pub fn new(checkpoint: Arc<Checkpoint>, options: Options) -> Reader {
        // Options that name a way of reading, or ask for what only a load has.
        let plain = matches!(options.io, Io::Auto | Io::Buffered)
            && options.cache != Cache::Bypass
            && options.copy != Some(false)
            && options.trace.is_empty();
        let files = checkpoint.local_files().ok().filter(|_| plain).map(|files| {
            let kinds = (0..files.len()).map(|_| FileKind::default()).collect();
            let kept = Arc::new(Kept::new(files));
            let most = options.window.min(MOST_HELD);
            let ahead = Ahead::new(kept.clone(), most, options.threads, options.stall_timeout);
            ManuallyDrop::new(ReaderFiles { kept, ahead, kinds })
        });
        Reader { checkpoint, options, pid: std::process::id(), files }
    }

    /// The checkpoint.
    pub fn checkpoint(&self) -> &Arc<Checkpoint> {
        &self.checkpoint
    }

    /// Bytes that were read ahead and nobody has asked for yet, or are about to be read.
    pub fn held(&self) -> u64 {
        self.usable().map_or(0, |open| open.ahead.held())
    }

    /// Lets go of what was read ahead, and closes the files. It can read on, and keeps nothing then.
    pub fn release(&self) {
        if let Some(open) = self.usable() {
            open.ahead.release();
        }
    }

    /// Whether file number `file` is on a file system that answers late. Opens it at first.
    ///
    /// # Errors
    /// The errors of opening; `Timeout`; `Cancelled` if `go_on` says no.
    pub fn is_distant(&self, file: u32, go_on: &mut (dyn FnMut() -> bool + Send)) -> Result<bool> {
        match self.usable() {
            Some(open) => {
                let is_distant = self.kind(open, file, go_on)? == FsKind::Network;
                if !is_distant {
                    open.kept.close(file); // until a part of it is wanted
                }
                Ok(is_distant)
            }
            None => Ok(false),
        }
    }

    /// The bytes of `want`; `None` if this is for a load.
    ///
    /// # Errors
    /// The errors of reading, `Changed` if the file is no longer the one that was opened, `Timeout`, and `Cancelled` if `go_on`
    /// says no.
    pub fn read(&self, want: &Want, go_on: &mut (dyn FnMut() -> bool + Send)) -> Result<Option<View>> {
        let Some(open) = self.usable() else { return Ok(None) };
        let runs = Runs::of(&self.checkpoint, want)?;
        let info = self.checkpoint.tensor(want.tensor);
        let (file, nbytes) = (info.file, runs.nbytes());
        let memory = match self.kind(open, file, go_on)? {
            FsKind::Network => {
                let found = &self.checkpoint.files()[file as usize];
                let data = found.data_start..found.size;
                open.ahead.fetch(file, parts(&runs), nbytes, data, go_on).map_err(|e| e.of_tensor(info.name))?
            }
            FsKind::Local | FsKind::Memory if self.options.io == Io::Auto && nbytes <= MOST_COPIED => {
                self.copy(open, file, &runs)?
            }
            _ => None,
        };
        Ok(memory.map(|memory| memory.view(nbytes)))
    }

    /// One copy out of the page cache; `None` if not all of it is there.
    fn copy(&self, open: &ReaderFiles, file: u32, runs: &Runs) -> Result<Option<Arc<Buffer>>> {
        let (nbytes, gap) = (runs.nbytes(), self.options.least_gap().min(LEAST_GAP));
        let memory = Arc::new(Buffer::new(nbytes)?);
        if nbytes == 0 {
            return Ok(Some(memory));
        }
        // The bytes between two runs of one call go to one place, which is never read.
        let apart = runs.axes.last().map_or(0, |axis| axis.1 - runs.len);
        if runs.count() > MOST_RANGES || (runs.count() > 1 && (runs.axes.len() > 1 || apart > gap)) {
            return Ok(None);
        }
        // Where not all of it is there, the kernel begins to read the whole span: no more than a load would read.
        if runs.count() * runs.len + (runs.count() - 1) * apart > MOST_COPIED {
            return Ok(None);
        }
        Ok(open.kept.copy(file, runs.start, (runs.count(), runs.len, apart), memory.at())?.then_some(memory))
    }

    fn kind(&self, open: &ReaderFiles, file: u32, go_on: &mut (dyn FnMut() -> bool + Send)) -> Result<FsKind> {
        let place = open.kinds.get(file as usize).ok_or_else(|| Error::new(ErrorKind::Internal, "no such file"))?;
        // One thread opens it. Its wait has an end, and so have those of the others.
        let _opening = loop {
            if let Some(known) = place.known.get() {
                return Ok(*known);
            }
            if self.usable().is_none() {
                return Ok(FsKind::Remote); // no file of this process
            }
            match place.opening.try_lock() {
                Ok(opening) => break opening,
                Err(TryLockError::Poisoned(opening)) => break opening.into_inner(),
                Err(TryLockError::WouldBlock) => {}
            }
            if !go_on() {
                return Err(Error::new(ErrorKind::Cancelled, "the read was cancelled"));
            }
            std::thread::sleep(MOMENT);
        };
        if let Some(known) = place.known.get() {
            return Ok(*known);
        }
        let (kept, asking) = (open.kept.clone(), open.kept.clone());
        let ask = move || {
            let _open = kept.open(file)?;
            Ok(kept.files().facts(file)?.kind)
        };
        let found = if asking.files().are_known_local() {
            here(ask)?
        } else {
            let progress =
                || asking.files().questions().and_then(Questions::asking).map_or(u64::MAX, |(answers, _)| answers);
            let path = || asking.files().path(file);
            detached(ask, Some(self.options.stall_timeout), progress, go_on).map_err(|e| match e.path() {
                None => e.at(path()),
                Some(_) => e,
            })?
        };
        Ok(*place.known.get_or_init(|| found))
    }

    /// A forked child has none of the threads, and one of them may have held a lock.
    fn usable(&self) -> Option<&ReaderFiles> {
        self.files.as_deref().filter(|_| self.pid == std::process::id())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.pid == std::process::id() {
            if let Some(mut open) = self.files.take() {
                // SAFETY: taken out, so that nobody uses it afterwards.
                unsafe { ManuallyDrop::drop(&mut open) };
            }
        }
    }
}

/// The runs as parts.
fn parts(runs: &Runs) -> impl Iterator<Item = FileRange> + Clone + '_ {
    (0..runs.count()).map(|number| FileRange { offset: runs.offset(number), len: runs.len, to: number * runs.len })
}
