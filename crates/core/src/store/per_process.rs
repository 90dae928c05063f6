//! A value of the process that a forked child makes anew.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// One value per process. No lock: another thread of the parent might have held it when the process forked. The value of
/// the parent is left alone in a child, for the same reason.
pub(super) struct PerProcess<T: 'static>(AtomicPtr<(u32, T)>);

impl<T: Default> PerProcess<T> {
    pub(super) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    pub(super) fn get(&'static self) -> &'static T {
        let pid = std::process::id();
        loop {
            let current = self.0.load(Ordering::Acquire);
            // SAFETY: null, or leaked below and never freed.
            if let Some((_, value)) = unsafe { current.as_ref() }.filter(|made| made.0 == pid) {
                return value;
            }
            let fresh = Box::into_raw(Box::new((pid, T::default())));
            if self.0.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
                // SAFETY: made above and published to nobody.
                drop(unsafe { Box::from_raw(fresh) });
            }
        }
    }

    /// The value of the process that this one was forked from; `None`: it had none, or this process has its own. A lock in it
    /// may be held for ever.
    pub(super) fn of_parent(&'static self) -> Option<&'static T> {
        // SAFETY: as above.
        let made = unsafe { self.0.load(Ordering::Acquire).as_ref() };
        made.filter(|made| made.0 != std::process::id()).map(|made| &made.1)
    }
}
