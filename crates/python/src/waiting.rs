//! Waits without the GIL that answer signals, and the end of the interpreter.

use crate::errors::detached;
use crate::guard::guarded;
use penstock::ErrorKind;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Waits are cut into pieces of this length. Between them Python runs its signal handlers.
const SIGNALS: Duration = Duration::from_millis(50);

/// Time from the end of the loads to the end of the interpreter, if nothing else delays it.
const AT_EXIT: Duration = Duration::from_secs(2);

/// The thread that ends the interpreter, when it has begun to do so.
static EXITING: AtomicI32 = AtomicI32::new(0);

/// Threads that are not Python's and have the GIL, or wait for it.
static ATTACHED: AtomicUsize = AtomicUsize::new(0);

/// Records that the calling thread ends the interpreter. It then ends all loads; only daemon threads can still wait for
/// one.
#[pyfunction]
pub(crate) fn exiting(py: Python<'_>) -> PyResult<()> {
    guarded(py, || {
        EXITING.store(this_thread(), Ordering::SeqCst);
        // The interpreter stops threads that want the GIL in the middle of what they do, which no thread of ours survives.
        let begun = Instant::now();
        py.detach(|| {
            while ATTACHED.load(Ordering::SeqCst) > 0 && begun.elapsed() < AT_EXIT {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        // While a driver is shut down it must not be called.
        py.detach(penstock::device::gpu::stop_pinning);
        Ok(())
    })
}

/// Runs `f` with the GIL on a thread that is not Python's; `None` if the interpreter ends. `f` is short.
pub(crate) fn attached<T>(f: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    struct Counted;
    impl Drop for Counted {
        fn drop(&mut self) {
            ATTACHED.fetch_sub(1, Ordering::SeqCst);
        }
    }
    ATTACHED.fetch_add(1, Ordering::SeqCst);
    let _counted = Counted;
    if EXITING.load(Ordering::SeqCst) != 0 {
        return None;
    }
    Python::try_attach(f)
}

fn this_thread() -> i32 {
    // SAFETY: a plain system call.
    unsafe { libc::gettid() }
}

/// A daemon thread stops here after the interpreter has ended its load. Python stops such threads too. An exception in
/// one would be printed although nothing is wrong.
fn stop_where_exiting<T>(found: &penstock::Result<T>) {
    let cancelled = matches!(found, Err(e) if e.kind() == ErrorKind::Cancelled);
    let exiting = EXITING.load(Ordering::Relaxed);
    if cancelled && exiting != 0 && exiting != this_thread() {
        // Not without a limit: code that runs later at exit may wait for this thread to end.
        std::thread::sleep(AT_EXIT);
    }
}

/// So many seconds; none where they are negative, and without an end where they are too many.
pub(crate) fn time_of(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

/// Waits without the GIL, in pieces, so that Ctrl-C works at once.
pub(crate) fn patiently<T: PartialEq + Send>(
    py: Python<'_>,
    timeout: Option<f64>,
    not_yet: T,
    wait: impl Fn(Duration) -> penstock::Result<T> + Sync,
) -> PyResult<T> {
    let deadline = timeout.and_then(|seconds| Instant::now().checked_add(time_of(seconds)));
    loop {
        let left = deadline.map_or(SIGNALS, |d| d.saturating_duration_since(Instant::now()).min(SIGNALS));
        let found = detached(py, || {
            let found = wait(left);
            stop_where_exiting(&found);
            found
        })?;
        // Return the result before looking at signals: a ready tensor is handed out only once. Python checks signals
        // itself before its next step.
        if found != not_yet {
            return Ok(found);
        }
        py.check_signals()?;
        if deadline.is_some_and(|d| Instant::now() >= d) {
            return Ok(found);
        }
    }
}
