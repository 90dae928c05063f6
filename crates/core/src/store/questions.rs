//! Questions about the files of a load that threads wait for: one that hangs is seen while others are answered.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The questions about the files of a load, by file, and the number of answers.
#[derive(Debug)]
pub struct Questions {
    answers: AtomicU64,
    /// Threads that wait, for each file. Counted per file and not in one place: an answer for one file must not end the
    /// wait for another that hangs.
    waiting: Vec<AtomicU32>,
}

impl Questions {
    /// No questions about so many files.
    pub fn of(files: usize) -> Questions {
        Questions { answers: AtomicU64::new(0), waiting: (0..files).map(|_| AtomicU32::new(0)).collect() }
    }

    /// A question about file number `file`, until this is dropped.
    pub fn ask(&self, file: u32) -> Asking<'_> {
        self.answered();
        let asking = &self.waiting[file as usize];
        asking.fetch_add(1, Ordering::Relaxed);
        Asking(asking)
    }

    /// Counts an answer. Returns the number of those before it.
    pub fn answered(&self) -> u64 {
        self.answers.fetch_add(1, Ordering::Relaxed)
    }

    /// A number that changes with each answer, and the first file that a thread waits for; `None` if no thread waits.
    pub fn asking(&self) -> Option<(u64, u32)> {
        let file = self.waiting.iter().position(|threads| threads.load(Ordering::Relaxed) > 0)?;
        Some((self.answers.load(Ordering::Relaxed), file as u32))
    }
}

/// A thread that waits for an answer about a file.
#[derive(Debug)]
pub struct Asking<'q>(&'q AtomicU32);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
