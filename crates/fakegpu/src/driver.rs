//! What the driver functions do, the same for both vendors. Names and argument checks of the interfaces themselves are
//! in `exports.rs`, `cuda.rs` and `hip.rs`.

use std::time::Duration;

use crate::clocks::Rows;
use crate::codes::{
    Vendor, ALREADY_REGISTERED, CAPTURE_INVALIDATED, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE,
    NOT_READY, NOT_REGISTERED, NO_DEVICE, OUT_OF_MEMORY,
};
use crate::memory::{is_mapped, Allocation, Region, POISON};
use crate::misuse::Kind;
use crate::state::{changed, context_handle, Call, Capture, Registration, CAPTURE_MODE, RELAXED};
use crate::stream::{sum_of, Event, Mark, Submission, Work};

/// What a driver function returns: nothing, or an error code.
pub(crate) type Outcome = Result<(), i32>;

/// The version both interfaces report: CUDA 12.8.
const DRIVER_VERSION: i32 = 12_080;

const NON_BLOCKING: u32 = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE`.
const PORTABLE: u32 = 1;

/// Writes through a pointer that the driver's caller gave.
///
/// # Safety
/// `at` is null or valid for a write of `T`.
unsafe fn give<T>(at: *mut T, value: T) -> Outcome {
    if at.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null, and the driver's contract makes it valid.
    unsafe { at.write(value) };
    Ok(())
}

/// Writes a text and its end into a buffer of `len` bytes, cut to fit.
///
/// # Safety
/// `at` is null or valid for `len` bytes.
unsafe fn give_text(at: *mut libc::c_char, len: i32, text: &str) -> Outcome {
    if at.is_null() || len < 1 {
        return Err(INVALID_VALUE);
    }
    let n = text.len().min(len as usize - 1);
    // SAFETY: `n + 1 <= len` bytes, which the driver's contract makes valid.
    unsafe {
        at.copy_from_nonoverlapping(text.as_ptr().cast(), n);
        at.add(n).write(0);
    }
    Ok(())
}

pub(crate) fn init(call: &mut Call, flags: u32) -> Outcome {
    if flags != 0 {
        return Err(call.wrong(Kind::BadArgument, INVALID_VALUE, format!("flags are {flags}, not 0")));
    }
    if call.devices.is_empty() {
        return Err(NO_DEVICE);
    }
    call.initialized = true;
    Ok(())
}

pub(crate) fn driver_version(_: &mut Call, version: *mut i32) -> Outcome {
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(version, DRIVER_VERSION) }
}

pub(crate) fn device_count(call: &mut Call, count: *mut i32) -> Outcome {
    call.initialized()?;
    let n = call.devices.len() as i32;
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(count, n) }?;
    // hipGetDeviceCount answers "no device". cuInit has already said so.
    if n == 0 && call.vendor == Vendor::Hip {
        return Err(NO_DEVICE);
    }
    Ok(())
}

fn device(call: &mut Call, ordinal: i32) -> Result<usize, i32> {
    call.initialized()?;
    usize::try_from(ordinal).ok().filter(|d| *d < call.devices.len()).ok_or(INVALID_DEVICE)
}

pub(crate) fn device_get(call: &mut Call, out: *mut i32, ordinal: i32) -> Outcome {
    device(call, ordinal)?;
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(out, ordinal) }
}

pub(crate) fn device_name(call: &mut Call, name: *mut libc::c_char, len: i32, dev: i32) -> Outcome {
    device(call, dev)?;
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give_text(name, len, "fakegpu on host memory") }
}

pub(crate) fn pci_bus_id(call: &mut Call, id: *mut libc::c_char, len: i32, dev: i32) -> Outcome {
    let d = device(call, dev)?;
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give_text(id, len, &format!("0000:{:02X}:00.0", d + 1)) }
}

pub(crate) fn attribute(call: &mut Call, out: *mut i32, attribute: i32, dev: i32) -> Outcome {
    let d = device(call, dev)?;
    // The two interfaces number the same properties differently (cuda.h 13, hip_runtime_api.h 7).
    let value = match (call.vendor, attribute) {
        (Vendor::Cuda, 18) | (Vendor::Hip, 16) => i32::from(call.settings.integrated),
        (Vendor::Cuda, 91) | (Vendor::Hip, 4) => i32::from(call.settings.host_pointer),
        // Maps host memory, unified addressing, host registration.
        (Vendor::Cuda, 19 | 41 | 99 | 113) | (Vendor::Hip, 3 | 85 | 90) => 1,
        // Copy engines.
        (Vendor::Cuda, 40) | (Vendor::Hip, 2) => 2,
        // Compute capability 9.0.
        (Vendor::Cuda, 75) | (Vendor::Hip, 23) => 9,
        // Largest pitch.
        (Vendor::Cuda, 11) | (Vendor::Hip, 58) => i32::MAX,
        // PCI bus.
        (Vendor::Cuda, 33) | (Vendor::Hip, 67) => d as i32 + 1,
        (_, 1..=200) | (Vendor::Hip, 0) => 0,
        _ => return Err(INVALID_VALUE),
    };
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(out, value) }
}

pub(crate) fn primary_retain(call: &mut Call, out: *mut usize, dev: i32) -> Outcome {
    let d = device(call, dev)?;
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(out, context_handle(d)) }?;
    call.devices[d].retains += 1;
    if call.devices[d].retains == 1 {
        call.context_made(d);
    }
    Ok(())
}

pub(crate) fn primary_release(call: &mut Call, dev: i32) -> Outcome {
    let d = device(call, dev)?;
    if call.devices[d].retains == 0 {
        let detail = format!("the primary context of device {d} is not retained");
        return Err(call.wrong(Kind::OverRelease, INVALID_CONTEXT, detail));
    }
    call.devices[d].retains -= 1;
    let owned = call.allocations.values().filter(|a| a.region.is_some() && a.device == d).count()
        + call.streams.values().filter(|s| s.counted && !s.destroyed && s.device == d).count()
        + call.events.values().filter(|e| e.device == d).count()
        + call.registrations.values().filter(|r| r.device == d).count();
    if call.devices[d].retains == 0 && owned > 0 && call.sticky.is_none() {
        let detail = format!(
            "the last release on device {d} while it owns {owned} allocations, registrations, streams and events"
        );
        call.wrong(Kind::ContextInUse, 0, detail);
    }
    Ok(())
}

pub(crate) fn primary_state(call: &mut Call, dev: i32, flags: *mut u32, active: *mut i32) -> Outcome {
    let d = device(call, dev)?;
    let is_active = i32::from(call.devices[d].retains > 0 || call.devices[d].touched_by_hip);
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(flags, 0).and_then(|()| give(active, is_active)) }
}

pub(crate) fn context_set(call: &mut Call, handle: usize) -> Outcome {
    call.initialized()?;
    if handle == 0 {
        call.set_context(0);
        return Ok(());
    }
    let d = (0..call.devices.len()).find(|d| context_handle(*d) == handle);
    if d.is_none_or(|d| call.devices[d].retains == 0) {
        let detail = format!("{handle:#x} is no retained primary context");
        return Err(call.wrong(Kind::NoContext, INVALID_CONTEXT, detail));
    }
    call.set_context(handle);
    Ok(())
}

pub(crate) fn context_get(call: &mut Call, out: *mut usize) -> Outcome {
    call.initialized()?;
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(out, call.context()) }
}

pub(crate) fn hip_device_set(call: &mut Call, dev: i32) -> Outcome {
    let d = device(call, dev)?;
    call.set_hip_device(d);
    Ok(())
}

pub(crate) fn hip_device_get(call: &mut Call, out: *mut i32) -> Outcome {
    if call.devices.is_empty() {
        return Err(NO_DEVICE);
    }
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(out, call.hip_device() as i32) }
}

pub(crate) fn alloc(call: &mut Call, out: *mut u64, bytes: usize) -> Outcome {
    let d = call.current()?;
    call.keeps_off_captures()?;
    if bytes == 0 || out.is_null() {
        return Err(INVALID_VALUE);
    }
    let bytes = bytes as u64;
    call.bytes = bytes;
    if bytes > call.settings.memory.saturating_sub(call.devices[d].bytes) {
        return Err(OUT_OF_MEMORY);
    }
    let region = Region::map(bytes).map_err(|_| OUT_OF_MEMORY)?;
    let start = region.start();
    if call.settings.poison {
        // SAFETY: a fresh mapping of at least `bytes` bytes that nobody else knows yet.
        unsafe { std::ptr::write_bytes(start as *mut u8, POISON, bytes as usize) };
    }
    call.allocations.insert(start, Allocation::new(start, bytes, d, Some(region)));
    call.devices[d].bytes += bytes;
    call.counters.device_bytes += bytes;
    call.counters.peak_device_bytes = call.counters.peak_device_bytes.max(call.counters.device_bytes);
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(out, start) }
}

pub(crate) fn free(call: &mut Call, pointer: u64) -> Outcome {
    call.current()?;
    call.keeps_off_captures()?;
    if pointer == 0 {
        return Ok(());
    }
    synchronize_all(call);
    let Some(allocation) = call.allocations.remove(&pointer) else {
        let detail = format!("{pointer:#x} is no live allocation");
        return Err(call.wrong(Kind::BadFree, INVALID_VALUE, detail));
    };
    let (start, end, len, device) = (allocation.start, allocation.end(), allocation.len, allocation.device);
    let Some(region) = allocation.region else {
        call.allocations.insert(start, Allocation { region: None, ..allocation });
        let detail = format!("{pointer:#x} is adopted memory that belongs to somebody else");
        return Err(call.wrong(Kind::BadFree, INVALID_VALUE, detail));
    };
    call.devices[device].bytes -= len;
    call.counters.device_bytes -= len;
    let pending = allocation.accesses.unknown_to(&call.host_clock, start, end, false).map(|a| a.describe());
    if let Some(pending) = pending {
        call.condemned.push(region);
        if call.sticky.is_none() {
            let detail = format!("{start:#x} freed, but the host never waited for: {pending}");
            call.wrong(Kind::FreePending, 0, detail);
        }
    }
    Ok(())
}

pub(crate) fn memory_info(call: &mut Call, free: *mut usize, total: *mut usize) -> Outcome {
    let d = call.current()?;
    let (all, used) = (call.settings.memory, call.devices[d].bytes);
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(free, all.saturating_sub(used) as usize).and_then(|()| give(total, all as usize)) }
}

/// HIP waits for all streams before it frees or unregisters (`SyncAllStreams` of its host_memory.cpp and memory.cpp).
fn synchronize_all(call: &mut Call) {
    if call.vendor != Vendor::Hip {
        return;
    }
    let marks: Vec<_> = call.streams.iter().map(|(handle, s)| (*handle, s.submitted)).collect();
    let generation = call.generation;
    for (handle, seq) in marks {
        while !call.is_done(handle, seq) && call.generation == generation && call.sticky.is_none() {
            call.wait();
        }
    }
}

pub(crate) fn host_register(call: &mut Call, pointer: u64, bytes: usize, flags: u32) -> Outcome {
    let device = call.current()?;
    call.keeps_off_captures()?;
    let (start, bytes) = (pointer, bytes as u64);
    if start == 0 || bytes == 0 {
        return Err(INVALID_VALUE);
    }
    if call.settings.refuse_register != 0 {
        return Err(call.settings.refuse_register);
    }
    let earlier = call.registrations.range(..start + bytes).next_back().map(|(s, r)| (*s, r.len));
    if let Some((other, len)) = earlier.filter(|(s, l)| s + l > start) {
        let detail = format!("{bytes} bytes at {start:#x} overlap the registration of {len} bytes at {other:#x}");
        let code = call.wrong(Kind::DoubleRegister, ALREADY_REGISTERED, detail);
        // HIP does not check: it makes a second buffer over the range. What unregistering both then does is unclear.
        return if call.vendor == Vendor::Hip { Ok(()) } else { Err(code) };
    }
    if !is_mapped(start, bytes) {
        let detail = format!("{bytes} bytes at {start:#x} are not all mapped");
        return Err(call.wrong(Kind::BadArgument, INVALID_VALUE, detail));
    }
    if call.counters.registered_bytes + bytes > call.settings.register_limit {
        return Err(OUT_OF_MEMORY);
    }
    call.bytes = bytes;
    // HIP maps the memory for every device, whatever the flags.
    let portable = flags & PORTABLE != 0 || call.vendor == Vendor::Hip;
    call.registrations.insert(start, Registration { len: bytes, device, portable });
    call.counters.registered_bytes += bytes;
    call.counters.peak_registered_bytes = call.counters.peak_registered_bytes.max(call.counters.registered_bytes);
    Ok(())
}

pub(crate) fn host_unregister(call: &mut Call, pointer: u64) -> Outcome {
    call.current()?;
    call.keeps_off_captures()?;
    synchronize_all(call);
    let Some(Registration { len: bytes, .. }) = call.registrations.remove(&pointer) else {
        let detail = format!("{pointer:#x} is not the start of a registration");
        return Err(call.wrong(Kind::BadUnregister, NOT_REGISTERED, detail));
    };
    call.counters.registered_bytes -= bytes;
    call.bytes = bytes;
    if call.sticky.is_some() {
        return Ok(());
    }
    let end = pointer + bytes;
    let pending = call.host_accesses.unknown_to(&call.host_clock, pointer, end, false).map(|a| a.describe());
    if let Some(pending) = pending {
        let detail = format!("{pointer:#x} unregistered, but the host never waited for: {pending}");
        call.wrong(Kind::UnregisterPending, 0, detail);
    }
    if !is_mapped(pointer, bytes) {
        call.wrong(Kind::Unmapped, 0, format!("{bytes} bytes at {pointer:#x} were unmapped while registered"));
    }
    Ok(())
}

pub(crate) fn host_device_pointer(call: &mut Call, out: *mut u64, pointer: u64, flags: u32) -> Outcome {
    let device = call.current()?;
    if flags != 0 || !call.is_registered(pointer, pointer + 1, device) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(out, pointer) }
}

pub(crate) fn address_range(call: &mut Call, start: *mut u64, bytes: *mut usize, pointer: u64) -> Outcome {
    call.current()?;
    let found = call.allocation_of(pointer, pointer + 1).map(|a| (a.start, a.len));
    let Some((at, len)) = found else { return Err(INVALID_VALUE) };
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(start, at).and_then(|()| give(bytes, len as usize)) }
}

/// The stream behind a handle that the program gave. 0 and 1 are the legacy default stream of the current device.
pub(crate) fn stream_of(call: &mut Call, handle: usize) -> Result<usize, i32> {
    let d = call.current()?;
    if handle <= 1 {
        return Ok(call.default_stream(d));
    }
    let Some(device) = call.streams.get(&handle).filter(|s| !s.destroyed).map(|s| s.device) else {
        let why = if call.dead.contains(&handle) { "was destroyed" } else { "never existed" };
        return Err(call.wrong(Kind::DeadHandle, INVALID_HANDLE, format!("stream {handle:#x} {why}")));
    };
    if device != d {
        let detail = format!("stream {handle:#x} belongs to device {device}, and the context of device {d} is current");
        return Err(call.wrong(Kind::WrongContext, INVALID_HANDLE, detail));
    }
    Ok(handle)
}

/// Checks that `rows` lie in one allocation of the current device.
fn device_rows(call: &mut Call, rows: &Rows) -> Outcome {
    let d = call.current()?;
    let (lo, hi) = (rows.start, rows.end());
    let Some(device) = call.allocation_of(lo, hi).map(|a| a.device) else {
        let detail = match call.allocation_of(lo, lo + 1) {
            Some(a) => format!("{lo:#x}..{hi:#x} leaves the allocation {:#x}..{:#x}", a.start, a.end()),
            None => format!("{lo:#x}..{hi:#x} is not device memory"),
        };
        return Err(call.wrong(Kind::OutOfBounds, INVALID_VALUE, detail));
    };
    if device != d {
        let detail = format!("{lo:#x}..{hi:#x} is memory of device {device}, and the context of device {d} is current");
        return Err(call.wrong(Kind::WrongContext, INVALID_VALUE, detail));
    }
    Ok(())
}

/// Checks that `rows` are host memory that a copy may use.
fn host_rows(call: &mut Call, rows: &Rows) -> Outcome {
    let (lo, hi) = (rows.start, rows.end());
    if call.touches_device(lo, hi) {
        let detail = format!("{lo:#x}..{hi:#x} is device memory where host memory belongs");
        return Err(call.wrong(Kind::BadArgument, INVALID_VALUE, detail));
    }
    if !is_mapped(lo, hi - lo) {
        let detail = format!("{lo:#x}..{hi:#x} is not all mapped");
        return Err(call.wrong(Kind::Unmapped, INVALID_VALUE, detail));
    }
    let device = call.current()?;
    if call.settings.strict && !call.is_registered(lo, hi, device) {
        call.wrong(Kind::Unregistered, 0, format!("host memory {lo:#x}..{hi:#x} is not registered"));
    }
    Ok(())
}

/// The direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    ToDevice,
    ToHost,
}

/// Submits one copy of rows.
pub(crate) fn copy(call: &mut Call, to: Rows, from: Rows, way: Way, stream: usize) -> Outcome {
    let handle = stream_of(call, stream)?;
    if to.bytes() == 0 {
        return Ok(());
    }
    let (device_side, host_side) = if way == Way::ToDevice { (&to, &from) } else { (&from, &to) };
    device_rows(call, device_side)?;
    host_rows(call, host_side)?;
    let to_device = (way == Way::ToDevice).then_some(call.streams[&handle].device);
    let sum = (call.settings.checksum && way == Way::ToDevice).then(|| sum_of(&from));
    call.copies += 1;
    let number = call.copies;
    match way {
        Way::ToDevice => call.counters.bytes_h2d += to.bytes(),
        Way::ToHost => call.counters.bytes_d2h += to.bytes(),
    }
    let what = call.name;
    let work = Work::Copy { to, from, sum, number, to_device };
    let accesses = vec![(from, false), (to, true)];
    call.submit(handle, None, Submission { what, work, delay: Duration::ZERO, accesses });
    Ok(())
}

pub(crate) fn copy_to_device(call: &mut Call, to: u64, from: u64, bytes: usize, stream: usize) -> Outcome {
    let bytes = bytes as u64;
    copy(call, Rows::range(to, bytes), Rows::range(from, bytes), Way::ToDevice, stream)
}

pub(crate) fn copy_to_host(call: &mut Call, to: u64, from: u64, bytes: usize, stream: usize) -> Outcome {
    let bytes = bytes as u64;
    copy(call, Rows::range(to, bytes), Rows::range(from, bytes), Way::ToHost, stream)
}

/// A copy of rows in the form of the 2D interfaces: start, distance of rows, width and height in bytes.
pub(crate) fn copy_rows(
    call: &mut Call,
    to: (u64, u64),
    from: (u64, u64),
    (width, rows): (u64, u64),
    way: Way,
    stream: usize,
) -> Outcome {
    if rows > 1 && (to.1 < width || from.1 < width) {
        let detail = format!("a pitch ({} or {}) is less than the width {width}", to.1, from.1);
        return Err(call.wrong(Kind::BadArgument, INVALID_VALUE, detail));
    }
    if to.1.max(from.1) > i32::MAX as u64 {
        let detail = format!("a pitch ({} or {}) is beyond the device's limit", to.1, from.1);
        return Err(call.wrong(Kind::BadArgument, INVALID_VALUE, detail));
    }
    let shape = |(start, pitch)| Rows { start, width, pitch, rows };
    copy(call, shape(to), shape(from), way, stream)
}

/// The batched copy: the addresses give the direction. Refuses the legacy default stream, as the real one does.
///
/// # Safety
/// The three arrays are null or hold `count` elements.
pub(crate) unsafe fn copy_batch(
    call: &mut Call,
    (to, from, sizes): (*const u64, *const u64, *const usize),
    count: usize,
    (attributes, indices, kinds): (*const Attributes, *const usize, usize),
    stream: usize,
) -> Outcome {
    if stream <= 1 {
        return Err(call.wrong(Kind::BadArgument, INVALID_VALUE, "not on the legacy default stream".to_owned()));
    }
    let nulls = to.is_null() || from.is_null() || sizes.is_null() || attributes.is_null() || indices.is_null();
    if count == 0 || kinds == 0 || kinds > count || nulls {
        return Err(call.wrong(Kind::BadArgument, INVALID_VALUE, "null or empty arrays".to_owned()));
    }
    // SAFETY: not null; the driver's contract gives them their lengths.
    let (kinds, indices) =
        unsafe { (std::slice::from_raw_parts(attributes, kinds), std::slice::from_raw_parts(indices, kinds)) };
    let ascending = indices[0] == 0 && indices.windows(2).all(|w| w[0] < w[1]) && indices[indices.len() - 1] < count;
    if !ascending || kinds.iter().any(|a| !(1..=3).contains(&a.order)) {
        return Err(call.wrong(
            Kind::BadArgument,
            INVALID_VALUE,
            "attributes or their indices make no sense".to_owned(),
        ));
    }
    for i in 0..count {
        // SAFETY: `i < count`.
        let (to, from, bytes) = unsafe { (*to.add(i), *from.add(i), *sizes.add(i)) };
        let way = if call.touches_device(to, to + 1) { Way::ToDevice } else { Way::ToHost };
        copy(call, Rows::range(to, bytes as u64), Rows::range(from, bytes as u64), way, stream)?;
    }
    Ok(())
}

/// `CUmemcpyAttributes` and `hipMemcpyAttributes`: the order in which the source is read, two places, flags.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attributes {
    order: i32,
    places: [i32; 4],
    flags: u32,
}

pub(crate) fn stream_create(call: &mut Call, out: *mut usize, flags: u32) -> Outcome {
    let d = call.current()?;
    if flags & !NON_BLOCKING != 0 || out.is_null() {
        return Err(INVALID_VALUE);
    }
    let handle = call.new_stream(d, flags & NON_BLOCKING == 0, true);
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(out, handle) }
}

pub(crate) fn stream_destroy(call: &mut Call, handle: usize) -> Outcome {
    if call.dead.contains(&handle) {
        let detail = format!("stream {handle:#x} was destroyed before");
        return Err(call.wrong(Kind::DoubleDestroy, INVALID_HANDLE, detail));
    }
    if handle <= 1 {
        return Err(call.wrong(Kind::DeadHandle, INVALID_HANDLE, "the default stream cannot be destroyed".to_owned()));
    }
    let handle = stream_of(call, handle)?;
    call.dead.insert(handle);
    if let Some(stream) = call.streams.get_mut(&handle) {
        stream.destroyed = true;
    }
    changed();
    Ok(())
}

pub(crate) fn stream_wait_event(call: &mut Call, stream: usize, event: usize, flags: u32) -> Outcome {
    let handle = stream_of(call, stream)?;
    if flags != 0 {
        return Err(INVALID_VALUE);
    }
    let Some(mark) = mark_of(call, event)? else {
        call.wrong(Kind::UnrecordedEvent, 0, format!("event {event:#x} was never recorded, so nothing is waited for"));
        return Ok(());
    };
    let what = call.name;
    call.submit(handle, Some(&mark), Submission::marker(what));
    Ok(())
}

pub(crate) fn stream_synchronize(call: &mut Call, stream: usize) -> Outcome {
    let handle = stream_of(call, stream)?;
    call.keeps_off_captures()?;
    let what = call.name;
    let mark = call.submit(handle, None, Submission::marker(what));
    host_waits(call, &mark);
    Ok(())
}

pub(crate) fn stream_is_capturing(call: &mut Call, stream: usize, status: *mut i32) -> Outcome {
    let handle = stream_of(call, stream)?;
    let capture = call.captures.iter().find(|c| c.stream == handle);
    // CU_STREAM_CAPTURE_STATUS_NONE, _ACTIVE and _INVALIDATED.
    let state = capture.map_or(0, |c| 1 + i32::from(c.broken));
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(status, state) }
}

/// Begins a capture. Work that is then queued on the stream still runs: only what a capture forbids other threads
/// matters here.
pub(crate) fn capture_begin(call: &mut Call, stream: usize, mode: i32) -> Outcome {
    let handle = stream_of(call, stream)?;
    if !(0..=2).contains(&mode) || call.captures.iter().any(|c| c.stream == handle) {
        return Err(INVALID_VALUE);
    }
    call.captures.push(Capture { stream: handle, mode, thread: std::thread::current().id(), broken: false });
    Ok(())
}

pub(crate) fn capture_end(call: &mut Call, stream: usize, graph: *mut usize) -> Outcome {
    let handle = stream_of(call, stream)?;
    let Some(at) = call.captures.iter().position(|c| c.stream == handle) else { return Err(INVALID_VALUE) };
    let broken = call.captures.swap_remove(at).broken;
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(graph, 0) }?;
    if broken {
        return Err(CAPTURE_INVALIDATED);
    }
    Ok(())
}

pub(crate) fn capture_mode(_: &mut Call, mode: *mut i32) -> Outcome {
    if mode.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: not null; the driver's contract makes it valid for both.
    let wanted = unsafe { mode.read() };
    if !(0..=RELAXED).contains(&wanted) {
        return Err(INVALID_VALUE);
    }
    // SAFETY: as above.
    unsafe { give(mode, CAPTURE_MODE.replace(wanted)) }
}

pub(crate) fn stream_capture_info(call: &mut Call, stream: usize, status: *mut i32, id: *mut u64) -> Outcome {
    stream_of(call, stream)?;
    if !id.is_null() {
        // SAFETY: the driver's contract for its out parameters.
        unsafe { give(id, 0) }?;
    }
    // SAFETY: as above.
    unsafe { give(status, 0) }
}

/// The mark that an event stands for; `None` if it was never recorded.
fn mark_of(call: &mut Call, handle: usize) -> Result<Option<Mark>, i32> {
    if let Some(event) = call.events.get(&handle) {
        return Ok(event.recorded.clone());
    }
    let why = if call.dead.contains(&handle) { "was destroyed" } else { "never existed" };
    Err(call.wrong(Kind::DeadHandle, INVALID_HANDLE, format!("event {handle:#x} {why}")))
}

/// Blocks the calling thread until the mark is reached. The host then knows what was known there.
fn host_waits(call: &mut Call, mark: &Mark) {
    let generation = call.generation;
    while !call.is_done(mark.stream, mark.seq) && call.generation == generation && call.sticky.is_none() {
        call.wait();
    }
    if call.generation == generation {
        call.host_clock.join(&mark.clock);
    }
}

pub(crate) fn event_create(call: &mut Call, out: *mut usize, _flags: u32) -> Outcome {
    let device = call.current()?;
    if out.is_null() {
        return Err(INVALID_VALUE);
    }
    let handle = call.new_handle();
    call.events.insert(handle, Event { device, recorded: None });
    // SAFETY: the driver's contract for its out parameters.
    unsafe { give(out, handle) }
}

pub(crate) fn event_record(call: &mut Call, event: usize, stream: usize) -> Outcome {
    mark_of(call, event)?;
    let handle = stream_of(call, stream)?;
    let (event_device, stream_device) = (call.events[&event].device, call.streams[&handle].device);
    if event_device != stream_device {
        let detail = format!("event of device {event_device} recorded on a stream of device {stream_device}");
        return Err(call.wrong(Kind::WrongContext, INVALID_HANDLE, detail));
    }
    let what = call.name;
    let mark = call.submit(handle, None, Submission::marker(what));
    if let Some(event) = call.events.get_mut(&event) {
        event.recorded = Some(mark);
    }
    Ok(())
}

pub(crate) fn event_query(call: &mut Call, event: usize) -> Outcome {
    call.keeps_off_captures()?;
    match mark_of(call, event)? {
        Some(mark) if !call.is_done(mark.stream, mark.seq) => Err(NOT_READY),
        Some(mark) => {
            call.host_clock.join(&mark.clock);
            Ok(())
        }
        None => Ok(()),
    }
}

pub(crate) fn event_synchronize(call: &mut Call, event: usize) -> Outcome {
    call.current()?;
    call.keeps_off_captures()?;
    if let Some(mark) = mark_of(call, event)? {
        host_waits(call, &mark);
    }
    Ok(())
}

pub(crate) fn event_destroy(call: &mut Call, event: usize) -> Outcome {
    call.current()?;
    if call.dead.contains(&event) {
        let detail = format!("event {event:#x} was destroyed before");
        return Err(call.wrong(Kind::DoubleDestroy, INVALID_HANDLE, detail));
    }
    mark_of(call, event)?;
    call.events.remove(&event);
    call.dead.insert(event);
    Ok(())
}
