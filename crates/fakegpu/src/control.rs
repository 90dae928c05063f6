//! The functions with which tests control the library and ask what it saw. [`Library`](crate::Library) documents them;
//! Python calls them through `ctypes`.
//!
//! Functions that return a text write at most `capacity` bytes and return the text's whole length; call with 0 to ask
//! for it. Functions that can fail return 0, or -1 for invalid arguments.

use std::ffi::CStr;
use std::time::{Duration, Instant};

use crate::clocks::Rows;
use crate::memory::Allocation;
use crate::misuse::Kind;
use crate::state::{changed, lock, wait, State};
use crate::stream::{fnv, Submission, Work};

/// Longest time that `fakegpu_reset` and `fakegpu_disown` wait for work to end; longer means a deadlock in a test.
const PATIENCE: Duration = Duration::from_secs(60);

/// Blocks until nothing is queued or running. If that does not happen, the process ends.
fn wait_until_idle(mut state: std::sync::MutexGuard<'static, State>) -> std::sync::MutexGuard<'static, State> {
    let deadline = Instant::now() + PATIENCE;
    while !state.is_idle() {
        if Instant::now() > deadline {
            eprintln!("fakegpu: work is still not done after {PATIENCE:?}");
            std::process::abort();
        }
        state = wait(state);
    }
    state
}

/// # Safety
/// `buffer` is null or valid for `capacity` bytes.
unsafe fn give(text: &str, buffer: *mut u8, capacity: usize) -> usize {
    if !buffer.is_null() {
        // SAFETY: the caller's promise, and the length is cut to it.
        unsafe { buffer.copy_from_nonoverlapping(text.as_ptr(), text.len().min(capacity)) };
    }
    text.len()
}

/// # Safety
/// `text` is null or a C string.
unsafe fn text_of<'a>(text: *const libc::c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().ok()
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_reset() -> u64 {
    let mut state = lock();
    state.released = u64::MAX;
    changed();
    state = wait_until_idle(state);
    let leaks = state.leaks().lines().count() as u64;
    // The streams' threads find that their streams are gone, and end.
    *state = State::new(state.generation + 1);
    changed();
    leaks
}

/// # Safety
/// Both are C strings.
#[no_mangle]
pub(crate) unsafe extern "C" fn fakegpu_configure(key: *const libc::c_char, value: *const libc::c_char) -> i32 {
    // SAFETY: the caller's promise.
    let (Some(key), Some(value)) = (unsafe { (text_of(key), text_of(value)) }) else { return -1 };
    let mut state = lock();
    let copies = state.copies;
    if state.settings.set(key, value, copies).is_none() {
        return -1;
    }
    if key == "devices" {
        let wanted = state.settings.devices;
        state.devices.resize_with(wanted, Default::default);
    }
    changed();
    0
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_misuse_count() -> u64 {
    lock().log.total()
}

/// # Safety
/// `buffer` is null or valid for `capacity` bytes.
#[no_mangle]
pub(crate) unsafe extern "C" fn fakegpu_misuse_log(buffer: *mut u8, capacity: usize) -> usize {
    let text = lock().log.text();
    // SAFETY: the caller's promise.
    unsafe { give(&text, buffer, capacity) }
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_misuse_clear() {
    lock().log.clear();
}

/// # Safety
/// `buffer` is null or valid for `capacity` bytes.
#[no_mangle]
pub(crate) unsafe extern "C" fn fakegpu_leaks(buffer: *mut u8, capacity: usize) -> usize {
    let text = lock().leaks();
    // SAFETY: the caller's promise.
    unsafe { give(&text, buffer, capacity) }
}

/// Every counter as (name, value).
fn counters(state: &State) -> Vec<(String, u64)> {
    let c = &state.counters;
    let own = |f: &dyn Fn(&crate::stream::Stream) -> bool| state.streams.values().filter(|s| f(s)).count() as u64;
    let mut list: Vec<(String, u64)> = [
        ("bytes_h2d", c.bytes_h2d),
        ("bytes_d2h", c.bytes_d2h),
        ("copies", state.copies),
        ("device_bytes", c.device_bytes),
        ("peak_device_bytes", c.peak_device_bytes),
        ("adopted_bytes", c.adopted_bytes),
        ("registered_bytes", c.registered_bytes),
        ("peak_registered_bytes", c.peak_registered_bytes),
        ("contexts_made", c.contexts_made),
        ("contexts_retained", state.devices.iter().map(|d| d.retains).sum()),
        ("streams", own(&|s| s.counted && !s.destroyed)),
        ("events", state.events.len() as u64),
        ("pending", own(&|s| s.completed < s.submitted)),
        ("misuses", state.log.total()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    list.extend(c.calls.iter().map(|(name, n)| (format!("calls.{name}"), *n)));
    list
}

/// # Safety
/// `name` is a C string.
#[no_mangle]
pub(crate) unsafe extern "C" fn fakegpu_counter(name: *const libc::c_char) -> u64 {
    // SAFETY: the caller's promise.
    let Some(name) = (unsafe { text_of(name) }) else { return u64::MAX };
    let list = counters(&lock());
    let found = list.iter().find(|(known, _)| known == name).map(|(_, value)| *value);
    // A function that was never called has no entry yet. Any other unknown name is a mistake in the test.
    found.unwrap_or(if name.starts_with("calls.") { 0 } else { u64::MAX })
}

/// # Safety
/// `buffer` is null or valid for `capacity` bytes.
#[no_mangle]
pub(crate) unsafe extern "C" fn fakegpu_counters(buffer: *mut u8, capacity: usize) -> usize {
    let text: String = counters(&lock()).iter().map(|(name, value)| format!("{name} {value}\n")).collect();
    // SAFETY: the caller's promise.
    unsafe { give(&text, buffer, capacity) }
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_adopt(pointer: u64, len: u64, device: i32) -> i32 {
    let mut state = lock();
    let Ok(device) = usize::try_from(device) else { return -1 };
    if pointer == 0 || len == 0 || device >= state.devices.len() || state.touches_device(pointer, pointer + len) {
        return -1;
    }
    state.allocations.insert(pointer, Allocation::new(pointer, len, device, None));
    state.counters.adopted_bytes += len;
    0
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_disown(pointer: u64) -> i32 {
    // The memory goes back to its real allocator, so nothing may be running on it. Whether that was *ordered* is not
    // checked: a caching allocator may take memory back while a stream still uses it.
    let mut state = wait_until_idle(lock());
    match state.allocations.get(&pointer) {
        Some(allocation) if allocation.region.is_none() => {
            let len = allocation.len;
            state.allocations.remove(&pointer);
            state.counters.adopted_bytes -= len;
            0
        }
        _ => -1,
    }
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_stream_create(device: i32, non_blocking: i32) -> usize {
    let mut state = lock();
    match usize::try_from(device) {
        Ok(device) if device < state.devices.len() => state.new_stream(device, non_blocking == 0, false),
        _ => 0,
    }
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_stream_destroy(stream: usize) -> i32 {
    let mut state = lock();
    if state.streams.get(&stream).is_none_or(|s| s.counted || s.destroyed) {
        return -1;
    }
    state.dead.insert(stream);
    if let Some(stream) = state.streams.get_mut(&stream) {
        stream.destroyed = true;
    }
    changed();
    0
}

/// Puts a stand-in for another program's kernel on `stream`; the device is the one that owns the memory.
fn launch(stream: usize, start: u64, len: u64, delay_us: u64, write: bool, what: &'static str, work: Work) -> i32 {
    let mut state = lock();
    let Some(device) = state.allocation_of(start, start + len).map(|a| a.device) else { return -1 };
    let handle = match stream {
        0 | 1 => state.default_stream(device),
        handle if state.streams.get(&handle).is_some_and(|s| s.device == device && !s.destroyed) => handle,
        _ => return -1,
    };
    let accesses = vec![(Rows::range(start, len), write)];
    state.submit(handle, None, Submission { what, work, delay: Duration::from_micros(delay_us), accesses });
    0
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_launch_write(stream: usize, start: u64, len: u64, byte: u8, delay_us: u64) -> i32 {
    launch(stream, start, len, delay_us, true, "kernel that writes", Work::Fill { start, len, byte })
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_launch_check(
    stream: usize,
    start: u64,
    len: u64,
    expected: u64,
    delay_us: u64,
) -> i32 {
    launch(stream, start, len, delay_us, false, "kernel that reads", Work::Check { start, len, expected })
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_launch_copy_out(stream: usize, start: u64, len: u64, out: u64, delay_us: u64) -> i32 {
    launch(stream, start, len, delay_us, false, "kernel that reads", Work::CopyOut { start, len, out })
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_pending_use(stream: usize, start: u64, len: u64, delay_us: u64) -> i32 {
    launch(stream, start, len, delay_us, true, "pending use", Work::Nothing)
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_host_access(start: u64, len: u64, write: i32) -> i32 {
    let mut state = lock();
    let end = start + len;
    let map = state.allocation_of(start, end).map_or(&state.host_accesses, |a| &a.accesses);
    let Some(pending) = map.unknown_to(&state.host_clock, start, end, write == 0).map(|a| a.describe()) else {
        return 0;
    };
    let verb = if write == 0 { "reads" } else { "writes" };
    let detail = format!("the host {verb} {start:#x}..{end:#x} and never waited for: {pending}");
    state.misuse(Kind::UnorderedAccess, detail);
    1
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_stream_synchronize(stream: usize, device: i32) -> i32 {
    let mut state = lock();
    let handle = match (stream, usize::try_from(device)) {
        (0 | 1, Ok(device)) if device < state.devices.len() => state.default_stream(device),
        (handle, _) if state.streams.contains_key(&handle) => handle,
        _ => return -1,
    };
    let mark = state.submit(handle, None, Submission::marker("synchronize"));
    while !state.is_done(mark.stream, mark.seq) && state.sticky.is_none() {
        state = wait(state);
    }
    state.host_clock.join(&mark.clock);
    0
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_drain() {
    drop(wait_until_idle(lock()));
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_release_hang() {
    let mut state = lock();
    state.released = state.copies;
    changed();
}

#[no_mangle]
pub(crate) extern "C" fn fakegpu_is_idle() -> i32 {
    i32::from(lock().is_idle())
}

/// # Safety
/// `start` is valid for reads of `len` bytes.
#[no_mangle]
pub(crate) unsafe extern "C" fn fakegpu_fnv(start: *const u8, len: usize) -> u64 {
    if len == 0 {
        return fnv(&[]);
    }
    // SAFETY: the caller's promise.
    fnv(unsafe { std::slice::from_raw_parts(start, len) })
}
