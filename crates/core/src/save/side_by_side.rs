//! Work on several things at the same time, on threads that end before the call does.

use crate::error::Result;
use crate::sync::{lock, Mutex};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Does `work` on each of these, at most `most` at the same time. After an error nothing more is begun.
///
/// # Errors
/// The first one.
pub(super) fn each<T: Sync>(all: &[T], most: usize, work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    let (next, is_over, failed) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(None));
    let run = || {
        while !is_over.load(Ordering::Relaxed) {
            let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            if let Err(e) = work(one) {
                is_over.store(true, Ordering::Relaxed);
                lock(&failed).get_or_insert(e);
            }
        }
    };
    std::thread::scope(|scope| {
        // If no thread can be started (a process limit), the calling thread does all of it.
        let others: Vec<_> = (1..most.min(all.len()))
            .map_while(|_| std::thread::Builder::new().name("penstock-end".into()).spawn_scoped(scope, run).ok())
            .collect();
        run();
        for thread in others {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    let first = lock(&failed).take();
    first.map_or(Ok(()), Err)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::sync::Barrier;

    #[test]
    fn each_is_worked_on_once_and_so_many_at_the_same_time() {
        let (meet, seen) = (Barrier::new(3), Mutex::new(Vec::new()));
        let all: Vec<u32> = (0..9).collect();
        each(&all, 3, |number| {
            meet.wait();
            lock(&seen).push(*number);
            Ok(())
        })
        .unwrap();
        let mut seen = lock(&seen).clone();
        seen.sort_unstable();
        assert_eq!(seen, all);
        each(&[] as &[u32], 3, |_| Ok(())).unwrap();
    }

    #[test]
    fn after_an_error_nothing_more_is_begun() {
        let begun = AtomicUsize::new(0);
        let e = each(&[0; 100], 1, |_| match begun.fetch_add(1, Ordering::Relaxed) {
            2 => Err(Error::invalid("on purpose")),
            _ => Ok(()),
        });
        assert_eq!((e.unwrap_err().message(), begun.into_inner()), ("on purpose", 3));
    }
}
