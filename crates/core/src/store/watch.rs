//! The waits of an open, and how much of its work the caller's own thread may do.
//!
//! A call to a file system that has stopped answering cannot be interrupted, and a long parse does not look at signals.
//! So the caller's thread opens only files that are small and in memory ([`Watch::here`]). Threads that can be left
//! behind open everything else, and the caller watches them through the same object.

use crate::error::{Error, ErrorKind, Result};
use crate::sync::{lock, Mutex};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of headers and of an index that the caller's thread parses in one open: about 3 ms.
const MOST_BYTES_HERE: u64 = 512 * 1024;

thread_local! {
    /// The caller of the question that this thread asks a store.
    static QUESTION: RefCell<Option<Caller>> = const { RefCell::new(None) };
    /// The listener of this thread: see [`hearing`].
    static LISTENER: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
}

#[cfg_attr(not(feature = "remote"), allow(dead_code))] // only servers ask for patience
struct Caller {
    given_up: Arc<AtomicBool>,
    /// Answers that ask for patience.
    again: Arc<AtomicU64>,
    stall: Option<Duration>,
}

/// Whether somebody still waits for the answer to the question that this thread asks a store. A store that waits for long
/// asks now and then, and ends with any error if nobody does.
pub fn still_wanted() -> bool {
    QUESTION.with_borrow(|question| question.as_ref().is_none_or(|asked| !asked.given_up.load(Ordering::Relaxed)))
}

/// How long the caller of this question waits for an answer, if it has said so: a server that stays busy is asked again for
/// so long.
#[cfg(feature = "remote")]
pub(super) fn stall() -> Option<Duration> {
    QUESTION.with_borrow(|question| question.as_ref().and_then(|asked| asked.stall))
}

/// Does work that asks a store. `heard` is called whenever a server answers or sends something, a few times a second at most.
pub(super) fn hearing<T>(heard: impl Fn() + 'static, work: impl FnOnce() -> T) -> T {
    struct Listening;
    impl Drop for Listening {
        fn drop(&mut self) {
            LISTENER.set(None);
        }
    }
    LISTENER.set(Some(Box::new(heard)));
    let _listening = Listening;
    work()
}

/// The caller of the question that this thread asks a store goes on waiting: somebody else brings what it asks for.
pub(super) fn is_there() {
    QUESTION.with_borrow(|question| {
        if let Some(asked) = question {
            asked.again.fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// A store says that its server has answered, if `really`, and has to be asked again: it is there, and the caller goes on waiting.
#[cfg(feature = "remote")]
pub(super) fn answered(really: bool) {
    if really {
        LISTENER.with_borrow(|listener| listener.iter().for_each(|heard| heard()));
        is_there();
    }
}

/// Progress of one open, shared by the threads that work on it and the caller that waits for them.
#[derive(Debug, Default)]
pub struct Watch {
    /// Bytes that the caller's thread may still parse; `None` on threads that can be left behind.
    left: Option<AtomicU64>,
    too_much: AtomicBool,
    given_up: Arc<AtomicBool>,
    /// Answers that ask for patience.
    again: Arc<AtomicU64>,
    asked: Mutex<Question>,
    /// How long the caller waits for an answer.
    stall: Option<Duration>,
}

#[derive(Debug, Default)]
struct Question {
    answers: u64,
    /// The paths that threads wait for, the longest wait first.
    waiting: Vec<(u64, PathBuf)>,
    next: u64,
}

impl Watch {
    /// For the caller's own thread: nothing may take long, and no read may wait.
    pub(crate) fn here() -> Watch {
        Watch { left: Some(AtomicU64::new(MOST_BYTES_HERE)), ..Watch::default() }
    }

    /// For threads whose caller waits so long for an answer.
    pub(crate) fn patient(stall: Duration) -> Watch {
        Watch { stall: Some(stall), ..Watch::default() }
    }

    /// Whether this is the caller's own thread.
    pub(crate) fn is_here(&self) -> bool {
        self.left.is_some()
    }

    /// Asks whether `bytes` more may be parsed on this thread.
    ///
    /// # Errors
    /// [`too_much`](Self::too_much), on the caller's thread only.
    pub(crate) fn afford(&self, bytes: u64) -> Result<()> {
        let Some(left) = &self.left else { return Ok(()) };
        match left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes)) {
            Ok(_) => Ok(()),
            Err(_) => Err(self.too_much()),
        }
    }

    /// The error that ends the attempt on the caller's thread: another thread then does the work. No user sees it.
    pub(crate) fn too_much(&self) -> Error {
        self.too_much.store(true, Ordering::Relaxed);
        Error::new(ErrorKind::Internal, "this is too much for the caller's thread")
    }

    /// Whether the attempt on the caller's thread ended with that error.
    pub(crate) fn was_too_much(&self) -> bool {
        self.too_much.load(Ordering::Relaxed)
    }

    /// Records that the file system is asked about `path`, until the value is dropped.
    pub(crate) fn ask(&self, path: &Path) -> Waiting<'_> {
        let mut asked = lock(&self.asked);
        let number = asked.next;
        asked.next += 1;
        asked.waiting.push((number, path.to_path_buf()));
        let (given_up, again, stall) = (self.given_up.clone(), self.again.clone(), self.stall);
        QUESTION.set(Some(Caller { given_up, again, stall }));
        Waiting { watch: self, number }
    }

    /// The number of answers so far, and the path of the longest wait; `None` if no thread waits.
    pub(crate) fn asking(&self) -> Option<(u64, PathBuf)> {
        let asked = lock(&self.asked);
        let answers = asked.answers + self.again.load(Ordering::Relaxed);
        asked.waiting.first().map(|(_, path)| (answers, path.clone()))
    }

    /// The caller no longer waits for the result.
    pub(crate) fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    /// Whether the caller no longer waits for the result. Then the work ends early, with any result.
    pub(crate) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed)
    }
}

/// A wait for the file system.
#[derive(Debug)]
pub(crate) struct Waiting<'a> {
    watch: &'a Watch,
    number: u64,
}

impl Waiting<'_> {
    /// The file system has answered. The next question is about the same path.
    pub(crate) fn answered(&self) {
        lock(&self.watch.asked).answers += 1;
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        QUESTION.set(None);
        let mut asked = lock(&self.watch.asked);
        asked.answers += 1;
        asked.waiting.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_wait_is_told_and_every_answer_is_progress() {
        let watch = Watch::default();
        assert_eq!(watch.asking(), None);
        let first = watch.ask(Path::new("a"));
        let second = watch.ask(Path::new("b"));
        assert_eq!(watch.asking(), Some((0, "a".into())));
        first.answered();
        assert_eq!(watch.asking(), Some((1, "a".into())));
        drop(first);
        assert_eq!(watch.asking(), Some((2, "b".into())));
        drop(second);
        assert_eq!(watch.asking(), None);
    }

    #[test]
    fn who_asks_a_store_knows_whether_it_is_still_wanted() {
        let watch = Watch::default();
        assert!(still_wanted());
        let asking = watch.ask(Path::new("a"));
        assert!(still_wanted());
        watch.give_up();
        assert!(!still_wanted());
        assert!(std::thread::spawn(still_wanted).join().unwrap(), "another thread asks something else");
        drop(asking);
        assert!(still_wanted());
    }

    #[cfg(feature = "remote")]
    #[test]
    fn who_asks_a_store_hears_that_bytes_come_until_the_work_ends() {
        let heard = Arc::new(AtomicU64::new(0));
        let count = heard.clone();
        let listener = move || {
            count.fetch_add(1, Ordering::Relaxed);
        };
        hearing(listener, || [true, false, true].into_iter().for_each(answered));
        answered(true);
        assert_eq!(heard.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn only_the_callers_thread_has_a_budget() {
        let (here, detached) = (Watch::here(), Watch::default());
        assert!(here.afford(MOST_BYTES_HERE).is_ok() && !here.was_too_much());
        assert!(here.afford(1).is_err() && here.was_too_much());
        assert!(detached.afford(u64::MAX).is_ok() && !detached.was_too_much());
    }
}
