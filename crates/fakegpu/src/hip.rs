//! The functions that only `libamdhip64.so` has in this shape: the device, not the context, is current, errors are
//! described by return value, and a 2D copy takes plain arguments.

#![allow(non_snake_case)]

use crate::codes::{name, text, Vendor, INVALID_VALUE};
use crate::driver::{self, copy_rows, Way};
use crate::misuse::Kind;
use crate::state::call;

#[no_mangle]
pub(crate) extern "C" fn hipSetDevice(device: i32) -> i32 {
    call(Vendor::Hip, "hipSetDevice", |call| driver::hip_device_set(call, device))
}

#[no_mangle]
pub(crate) extern "C" fn hipGetDevice(device: *mut i32) -> i32 {
    call(Vendor::Hip, "hipGetDevice", |call| driver::hip_device_get(call, device))
}

#[no_mangle]
pub(crate) extern "C" fn hipMemcpy2DAsync(
    to: u64,
    to_pitch: usize,
    from: u64,
    from_pitch: usize,
    width: usize,
    height: usize,
    kind: i32,
    stream: usize,
) -> i32 {
    call(Vendor::Hip, "hipMemcpy2DAsync", |call| {
        let way = match kind {
            1 => Way::ToDevice,
            2 => Way::ToHost,
            _ => return Err(call.wrong(Kind::BadArgument, INVALID_VALUE, format!("kind {kind}"))),
        };
        let shape = (width as u64, height as u64);
        copy_rows(call, (to, to_pitch as u64), (from, from_pitch as u64), shape, way, stream)
    })
}

#[no_mangle]
pub(crate) extern "C" fn hipGetErrorName(error: i32) -> *const libc::c_char {
    name(error, Vendor::Hip).unwrap_or(c"hipErrorUnknown").as_ptr()
}

#[no_mangle]
pub(crate) extern "C" fn hipGetErrorString(error: i32) -> *const libc::c_char {
    text(error).unwrap_or(c"unknown error").as_ptr()
}
