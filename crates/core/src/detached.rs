//! Detached calls: work that may hang in the kernel, done on a thread that can be left behind.
//!
//! Opening a file of a network mount whose server is gone, or asking for its size, cannot be interrupted: the thread
//! that does it is lost until the server comes back. So a separate thread does it, and the caller waits only for a
//! limited time.

use crate::error::{Error, ErrorKind, Result};
use crate::threads::guarded;
use std::sync::mpsc::{sync_channel, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How often the waiting thread checks whether to continue.
const LOOK: Duration = Duration::from_millis(50);

/// Does `work` on a separate thread and waits for it. Gives up if `go_on` says no (kind `Cancelled`), or if for `stall`
/// the work has not ended and `progress` has not changed (kind `Timeout`). Work that is given up keeps its thread and
/// everything that it owns until it ends.
pub(crate) fn detached<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
    stall: Option<Duration>,
    mut progress: impl FnMut() -> u64,
    mut go_on: impl FnMut() -> bool,
) -> Result<T> {
    let (tell, told) = sync_channel(1);
    let thread = std::thread::Builder::new().name("penstock-ask".into());
    let thread = thread
        .spawn(move || {
            // The caller may have given up. Then the result is dropped here.
            let _unheard = tell.send(guarded("penstock-ask", work).and_then(|done| done));
        })
        .map_err(|e| Error::new(ErrorKind::Limit, format!("cannot start the thread that opens the files: {e}")))?;
    let mut moved = Instant::now();
    let mut before = progress();
    loop {
        match told.recv_timeout(LOOK.min(stall.unwrap_or(LOOK))) {
            Ok(result) => {
                // The thread has nothing left to do except to end. After the join, a caller that counts threads finds
                // none.
                let _ended = thread.join();
                return result;
            }
            Err(RecvTimeoutError::Disconnected) => {
                let text = "the code that opens the files panicked; please report this";
                return Err(Error::new(ErrorKind::Internal, text));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if !go_on() {
            return Err(Error::new(ErrorKind::Cancelled, "the load was cancelled"));
        }
        let now = progress();
        if now != before {
            (moved, before) = (Instant::now(), now);
        }
        if let Some(stall) = stall.filter(|s| moved.elapsed() >= *s) {
            let text = format!(
                "the storage has not answered for {:.1} s; is its server stuck? (stall_timeout raises the limit)",
                stall.as_secs_f64()
            );
            return Err(Error::new(ErrorKind::Timeout, text));
        }
    }
}

/// Does such work on the caller's own thread, if it is known not to hang. A panic becomes the same error as on a
/// separate thread.
pub(crate) fn here<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    guarded("penstock-ask", work).and_then(|done| done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_hangs_is_left_behind_and_work_that_moves_is_not() {
        let hang = || {
            std::thread::sleep(Duration::from_secs(2));
            Ok(())
        };
        let stall = Some(Duration::from_millis(120));
        assert_eq!(detached(hang, stall, || 0, || true).map_err(|e| e.kind()), Err(ErrorKind::Timeout));
        assert_eq!(detached(hang, None, || 0, || false).map_err(|e| e.kind()), Err(ErrorKind::Cancelled));
        let mut moves = 0;
        let slow = || {
            std::thread::sleep(Duration::from_millis(400));
            Ok(7)
        };
        let progress = || {
            moves += 1;
            moves
        };
        assert_eq!(detached(slow, stall, progress, || true).map_err(|e| e.kind()), Ok(7));
        let broken = || -> Result<()> { panic!("on purpose") };
        assert_eq!(detached(broken, None, || 0, || true).map_err(|e| e.kind()), Err(ErrorKind::Internal));
        assert_eq!(here(broken).map_err(|e| e.kind()), Err(ErrorKind::Internal));
        assert_eq!(here(|| Ok(7)).map_err(|e| e.kind()), Ok(7));
    }
}
