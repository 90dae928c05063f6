//! Rows: evenly strided bytes, and their copies within memory.

use std::ptr;

/// Evenly strided rows of a read, and their places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowPlaces {
    /// Offset of the first row in the read.
    pub from: u64,
    /// Address of the first row's place.
    pub to: *mut u8,
    /// Bytes of each row.
    pub len: u64,
    /// Number of rows, at least 1.
    pub rows: u64,
    /// Bytes from one row to the next in the file (anything where `rows` is 1).
    pub from_stride: u64,
    /// Bytes from one place to the next.
    pub to_stride: u64,
}

/// Bytes that a read brings of `rows` rows of `len` bytes, if gaps of at most `gap` bytes are read and longer ones are
/// skipped.
pub(crate) fn bytes_read(len: u64, rows: u64, stride: u64, gap: u64) -> u64 {
    match rows {
        2.. if stride.saturating_sub(len) <= gap => (rows - 1) * stride + len,
        _ => rows * len,
    }
}

/// Copies `rows` rows of `len` bytes.
///
/// # Safety
/// All rows of both sides are valid and do not overlap.
pub(crate) unsafe fn copy(from: (*const u8, usize), to: (*mut u8, usize), len: usize, rows: usize) {
    let ((from, from_stride), (to, to_stride)) = (from, to);
    if rows <= 1 || (from_stride == len && to_stride == len) {
        // SAFETY: as the function's: dense rows are one range.
        unsafe { ptr::copy_nonoverlapping(from, to, len * rows) };
        return;
    }
    // SAFETY: as the function's.
    unsafe {
        match len {
            // If rows are single elements (a column of a matrix), a call to memcpy costs more than the bytes it moves.
            1 => copy_of::<1>(from, from_stride, to, to_stride, rows),
            2 => copy_of::<2>(from, from_stride, to, to_stride, rows),
            4 => copy_of::<4>(from, from_stride, to, to_stride, rows),
            8 => copy_of::<8>(from, from_stride, to, to_stride, rows),
            _ => {
                for row in 0..rows {
                    ptr::copy_nonoverlapping(from.add(row * from_stride), to.add(row * to_stride), len);
                }
            }
        }
    }
}

/// Rows of a size known to the compiler.
///
/// # Safety
/// As for [`copy`].
unsafe fn copy_of<const N: usize>(from: *const u8, from_stride: usize, to: *mut u8, to_stride: usize, rows: usize) {
    for row in 0..rows {
        // SAFETY: as the function's; arrays of bytes need no alignment.
        unsafe {
            let bytes = from.add(row * from_stride).cast::<[u8; N]>().read();
            to.add(row * to_stride).cast::<[u8; N]>().write(bytes);
        }
    }
}
