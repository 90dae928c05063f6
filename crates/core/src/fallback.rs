//! Refusals of the kernel or a driver during a load or a save, and their replacements.

/// One refusal, and its replacement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// The refused interface, such as "io_uring" or "O_DIRECT".
    pub from: &'static str,
    /// The replacement.
    pub to: &'static str,
    /// The reason: the file (if one is concerned), the system call and its errno.
    pub reason: String,
}
