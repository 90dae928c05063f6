//! The functions that only `libcuda.so.1` has in this shape.

#![allow(non_snake_case)]

use crate::codes::{name, text, Vendor, INVALID_VALUE};
use crate::driver::{copy_rows, Way};
use crate::misuse::Kind;
use crate::state::call;

/// `CUDA_MEMCPY2D_v2` of cuda.h: 128 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Memcpy2d {
    pub(crate) src_x: usize,
    pub(crate) src_y: usize,
    /// 1 host, 2 device.
    pub(crate) src_type: u32,
    pub(crate) src_host: u64,
    pub(crate) src_device: u64,
    pub(crate) src_array: u64,
    pub(crate) src_pitch: usize,
    pub(crate) dst_x: usize,
    pub(crate) dst_y: usize,
    pub(crate) dst_type: u32,
    pub(crate) dst_host: u64,
    pub(crate) dst_device: u64,
    pub(crate) dst_array: u64,
    pub(crate) dst_pitch: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

const _: () = assert!(size_of::<Memcpy2d>() == 128);

/// # Safety
/// `copy` points to a `CUDA_MEMCPY2D`.
#[no_mangle]
pub(crate) unsafe extern "C" fn cuMemcpy2DAsync_v2(copy: *const Memcpy2d, stream: usize) -> i32 {
    call(Vendor::Cuda, "cuMemcpy2DAsync_v2", |call| {
        if copy.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, the caller's promise.
        let c = unsafe { copy.read() };
        let (way, to, from) = match (c.src_type, c.dst_type) {
            (1, 2) => (Way::ToDevice, c.dst_device, c.src_host),
            (2, 1) => (Way::ToHost, c.dst_host, c.src_device),
            (from, to) => {
                let detail = format!("memory types {from} to {to}");
                return Err(call.wrong(Kind::BadArgument, INVALID_VALUE, detail));
            }
        };
        if c.src_pitch < c.width + c.src_x || c.dst_pitch < c.width + c.dst_x {
            let detail = format!("a pitch ({}, {}) is less than x + width", c.src_pitch, c.dst_pitch);
            return Err(call.wrong(Kind::BadArgument, INVALID_VALUE, detail));
        }
        let to = (to + (c.dst_y * c.dst_pitch + c.dst_x) as u64, c.dst_pitch as u64);
        let from = (from + (c.src_y * c.src_pitch + c.src_x) as u64, c.src_pitch as u64);
        copy_rows(call, to, from, (c.width as u64, c.height as u64), way, stream)
    })
}

/// # Safety
/// `out` is valid for a write.
#[no_mangle]
pub(crate) unsafe extern "C" fn cuGetErrorName(error: i32, out: *mut *const libc::c_char) -> i32 {
    let name = name(error, Vendor::Cuda);
    // SAFETY: the caller's promise.
    unsafe { out.write(name.map_or(std::ptr::null(), |n| n.as_ptr())) };
    name.map_or(INVALID_VALUE, |_| 0)
}

/// # Safety
/// `out` is valid for a write.
#[no_mangle]
pub(crate) unsafe extern "C" fn cuGetErrorString(error: i32, out: *mut *const libc::c_char) -> i32 {
    let text = text(error);
    // SAFETY: the caller's promise.
    unsafe { out.write(text.map_or(std::ptr::null(), |t| t.as_ptr())) };
    text.map_or(INVALID_VALUE, |_| 0)
}
