//! A libcuda and libamdhip64 on host memory that detect misuse. For development only.
//!
//! The cdylib exports the driver functions that penstock uses, under the names that the real libraries export
//! (`cuMemAlloc_v2`, `hipMalloc`, ...). It also exports a control interface (`fakegpu_*`, see [`Library`]) that tests
//! call from Rust or from Python's `ctypes`. Device memory is anonymous host memory between guard pages, so a device
//! pointer can be read directly. A stream is a thread with a queue, so a copy really runs later than its submission. An
//! event is a marker in that queue.
//!
//! Two detectors work side by side. *What happened*: the source of every copy to the device is summed when the copy is
//! submitted, and the bytes that arrived are summed when it has run. So the library sees a staging buffer that is
//! rewritten too early. *What could have happened*: streams, events and host synchronisation carry vector clocks. Two
//! accesses to the same bytes, one of them a write, are a misuse if nothing orders them, even if they came in a
//! harmless order this time. So a removed fence is found every time, not once in a hundred runs.
//!
//! The host counts as one participant. A driver cannot see how its threads order themselves, so what any of them has
//! waited for counts as known to all. That can hide a race between host threads, but it can never invent one.
//!
//! The control interface, for `ctypes`. Addresses and streams are 64-bit integers. `fakegpu_reset` and a few more
//! return numbers, the rest 0 or -1. Texts are written up to `capacity` bytes, and their whole length is returned:
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
//! The state belongs to the loaded library, and tests in one process share it: take [`Library::exclusive`], which also
//! resets. The `Kind` enum of `misuse.rs` lists every kind of misuse. `inject.rs` lists every setting (environment
//! variable or [`Library::configure`] key).

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
