//! The kinds of misuse, and the log of them.

use std::fmt;

/// A way to misuse the driver. The log shows the kebab-case name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A copy that leaves its device allocation, or an address that is not device memory.
    OutOfBounds,
    /// The source of a copy changed between submission and execution: a staging buffer was reused too early.
    SourceModified,
    /// The source or destination of a copy was unmapped before the copy ran.
    Unmapped,
    /// Two accesses to the same bytes, one of them a write, in no order.
    UnorderedAccess,
    /// Device memory freed while work on it was not known to be complete.
    FreePending,
    /// A free of something that is not a live allocation.
    BadFree,
    /// A stream or event used after it was destroyed, or that never existed.
    DeadHandle,
    /// A stream or event destroyed twice.
    DoubleDestroy,
    /// A wait for an event that was never recorded.
    UnrecordedEvent,
    /// A call that needs a current context on a thread that has none.
    NoContext,
    /// A stream, event or allocation of one device used while another one is current.
    WrongContext,
    /// A context on a device outside the `expect_devices` set.
    ForeignDevice,
    /// A primary context released more often than retained.
    OverRelease,
    /// The last release of a primary context that still owned something.
    ContextInUse,
    /// Host memory unregistered while copies from or to it were not known to be complete.
    UnregisterPending,
    /// Host memory registered that already was registered.
    DoubleRegister,
    /// Host memory unregistered that was not registered.
    BadUnregister,
    /// Strict mode: a copy from or to host memory that is not registered.
    Unregistered,
    /// An argument that the real driver refuses, or a host pointer where a device pointer belongs.
    BadArgument,
    /// A potentially unsafe call while another thread captures in global mode: it invalidates that capture.
    CaptureBroken,
    /// The stand-in for the consumer's kernel read other bytes than it expected.
    WrongBytes,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::OutOfBounds => "out-of-bounds",
            Self::SourceModified => "source-modified",
            Self::Unmapped => "unmapped",
            Self::UnorderedAccess => "unordered-access",
            Self::FreePending => "free-with-work-pending",
            Self::BadFree => "bad-free",
            Self::DeadHandle => "dead-handle",
            Self::DoubleDestroy => "double-destroy",
            Self::UnrecordedEvent => "unrecorded-event",
            Self::NoContext => "no-context",
            Self::WrongContext => "wrong-context",
            Self::ForeignDevice => "context-on-another-device",
            Self::OverRelease => "over-release",
            Self::ContextInUse => "context-destroyed-in-use",
            Self::UnregisterPending => "unregister-with-copies-pending",
            Self::DoubleRegister => "double-register",
            Self::BadUnregister => "bad-unregister",
            Self::Unregistered => "unregistered-memory",
            Self::BadArgument => "bad-argument",
            Self::CaptureBroken => "capture-broken",
            Self::WrongBytes => "wrong-bytes",
        }
    }
}

/// What to do when a misuse is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Reaction {
    #[default]
    Record,
    Abort,
}

/// One misuse: its kind and what was done to which address, stream or event.
#[derive(Debug, Clone)]
pub(crate) struct Misuse {
    kind: Kind,
    detail: String,
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.name(), self.detail)
    }
}

/// All misuses since the last reset.
#[derive(Debug, Default)]
pub(crate) struct Log {
    entries: Vec<Misuse>,
    total: u64,
}

impl Log {
    /// Entries kept: a program that repeats one mistake in a loop must not fill the memory.
    const KEPT: usize = 1000;

    pub(crate) fn add(&mut self, reaction: Reaction, kind: Kind, detail: String) {
        let misuse = Misuse { kind, detail };
        if reaction == Reaction::Abort {
            eprintln!("fakegpu: {misuse}");
            std::process::abort();
        }
        self.total += 1;
        if self.entries.len() < Self::KEPT {
            self.entries.push(misuse);
        }
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn text(&self) -> String {
        self.entries.iter().map(|m| format!("{m}\n")).collect()
    }
}
