//! A libcuda and libamdhip64 on host memory that detects misuse. Development only.
//!
//! The cdylib exports the driver functions penstock uses, under the names the real libraries export (`cuMemAlloc_v2`,
//! `hipMalloc`, ...), and a control interface (`fakegpu_*`, see [`Library`]) that tests call from Rust or from Python's
//! `ctypes`. Device memory is anonymous host memory between guard pages, so a device pointer can be read directly;
//! a stream is a thread with a queue, so a copy really runs later than its submission; an event is a marker in that
//! queue.
//!
//! Two detectors work side by side. *What happened*: every copy's source is summed when it is submitted and the bytes
//! that arrived are summed when it has run, so a staging buffer that is rewritten too early is seen. *What could have
//! happened*: streams, events and host synchronisation carry vector clocks, and two accesses to the same bytes, one of
//! them a write, that no chain of those orders are a misuse even if this time they came in a harmless order. A removed
//! fence is therefore found every time, not once in a hundred runs.
//!
//! The host counts as one participant: its threads order themselves by means a driver cannot see, so whatever any of
//! them has waited for counts as known to all. That can hide a race between host threads; it can never invent one.
//!
//! The control interface, for `ctypes` (addresses and streams are 64-bit integers; `fakegpu_reset` and a few more give
//! numbers, the rest 0 or -1; texts are written up to `capacity` bytes and their whole length is returned):
//!
//! ```c
//! uint64_t fakegpu_reset(void);                                   // number of things leaked until then
//! int32_t  fakegpu_configure(const char *key, const char *value); // the table in inject.rs
//! uint64_t fakegpu_misuse_count(void);
//! size_t   fakegpu_misuse_log(uint8_t *buffer, size_t capacity);  // "kind: what happened\n" ...
//! void     fakegpu_misuse_clear(void);
//! size_t   fakegpu_leaks(uint8_t *buffer, size_t capacity);       // "leak: what\n" ...
//! uint64_t fakegpu_counter(const char *name);                     // UINT64_MAX: no such counter
//! size_t   fakegpu_counters(uint8_t *buffer, size_t capacity);    // "name value\n" ...
//! int32_t  fakegpu_adopt(uint64_t start, uint64_t len, int32_t device);
//! int32_t  fakegpu_disown(uint64_t start);
//! uint64_t fakegpu_stream_create(int32_t device, int32_t non_blocking);
//! int32_t  fakegpu_stream_destroy(uint64_t stream);
//! int32_t  fakegpu_stream_synchronize(uint64_t stream, int32_t device);
//! int32_t  fakegpu_launch_write(uint64_t stream, uint64_t start, uint64_t len, uint8_t byte, uint64_t delay_us);
//! int32_t  fakegpu_launch_check(uint64_t stream, uint64_t start, uint64_t len, uint64_t fnv1a, uint64_t delay_us);
//! int32_t  fakegpu_launch_copy_out(uint64_t stream, uint64_t start, uint64_t len, uint64_t out, uint64_t delay_us);
//! int32_t  fakegpu_pending_use(uint64_t stream, uint64_t start, uint64_t len, uint64_t delay_us);
//! int32_t  fakegpu_host_access(uint64_t start, uint64_t len, int32_t write); // 1: unordered, and logged
//! void     fakegpu_drain(void);
//! int32_t  fakegpu_is_idle(void);                                 // 1 or 0
//! void     fakegpu_release_hang(void);
//! uint64_t fakegpu_fnv(const uint8_t *start, size_t len);
//! ```
//!
//! State belongs to the loaded library. Tests in one process share it: take [`Library::exclusive`], which also resets.
//! Every misuse kind is listed in the `Kind` enum of `misuse.rs`, every setting (environment variable or
//! [`Library::configure`] key) in `inject.rs`.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod clocks;
mod codes;
mod control;
mod cuda;
mod driver;
mod exports;
mod hip;
mod inject;
mod library;
mod memory;
mod misuse;
mod state;
mod stream;

pub use library::{library_path, without, Exclusive, Library};

#[cfg(test)]
mod tests;
