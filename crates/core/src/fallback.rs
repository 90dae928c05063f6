//! What the kernel or a driver refused during a load or a save, and what was done instead.

/// A lane that was refused, and what replaced it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// What was refused, such as "io_uring" or "O_DIRECT".
    pub from: &'static str,
    /// What is used instead.
    pub to: &'static str,
    /// The reason: the file (if one is concerned), the system call and its errno.
    pub reason: String,
}
