//! DLPack capsules over views, written by hand: the struct layouts are those of dlpack.h, version 0 ("dltensor",
//! unversioned), which every consumer takes.

use crate::guard::letting_go;
use penstock::memory::View;
use pyo3::ffi;
use pyo3::prelude::*;
use std::borrow::Borrow;
use std::ffi::{c_void, CStr};
use std::os::raw::c_int;

/// `DLDeviceType`s that penstock fills.
pub(crate) const CPU: c_int = 1;
pub(crate) const CUDA: c_int = 2;
pub(crate) const ROCM: c_int = 10;

const NAME: &CStr = c"dltensor";

#[repr(C)]
struct DLDevice {
    device_type: c_int,
    device_id: c_int,
}

#[repr(C)]
struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct DLTensor {
    data: *mut c_void,
    device: DLDevice,
    ndim: c_int,
    dtype: DLDataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct DLManagedTensor {
    tensor: DLTensor,
    manager_ctx: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// Dimensions of a tensor, without a separate allocation if there are few: one such list is made per tensor.
pub(crate) enum Shape {
    Few([i64; FEW], u8),
    Many(Vec<i64>),
}

/// Nearly every weight has fewer dimensions.
const FEW: usize = 5;

impl FromIterator<i64> for Shape {
    fn from_iter<I: IntoIterator<Item = i64>>(dimensions: I) -> Self {
        let (mut few, mut count) = ([0; FEW], 0);
        let mut dimensions = dimensions.into_iter();
        for dimension in dimensions.by_ref() {
            if count == FEW {
                let rest = std::iter::once(dimension).chain(dimensions);
                return Shape::Many(few.into_iter().chain(rest).collect());
            }
            few[count] = dimension;
            count += 1;
        }
        Shape::Few(few, count as u8)
    }
}

impl std::ops::Deref for Shape {
    type Target = [i64];
    fn deref(&self) -> &[i64] {
        match self {
            Shape::Few(few, count) => &few[..usize::from(*count)],
            Shape::Many(many) => many,
        }
    }
}

impl std::ops::DerefMut for Shape {
    fn deref_mut(&mut self) -> &mut [i64] {
        match self {
            Shape::Few(few, count) => &mut few[..usize::from(*count)],
            Shape::Many(many) => many,
        }
    }
}

/// The contents of a capsule: the struct that its consumer sees, and the share in the block that keeps the bytes alive.
struct Owned<T> {
    managed: DLManagedTensor,
    shape: Shape,
    share: T,
}

unsafe extern "C" fn delete<T: Borrow<View>>(managed: *mut DLManagedTensor) {
    // SAFETY: `managed` is the context's first half made in `capsule`, deleted once, as DLPack asks of its consumers.
    let owned = unsafe { Box::from_raw((*managed).manager_ctx.cast::<Owned<T>>()) };
    letting_go(|| {
        let mut owned = Some(owned);
        if owned.as_ref().is_some_and(|owned| owned.share.borrow().is_held()) {
            // torch frees tensors without the GIL. A Python object that is released in this way is freed at a later
            // call of ours, which may never come. Here it is a block of GPU memory, and another load may be waiting for
            // it.
            Python::try_attach(|_| drop(owned.take()));
        }
        drop(owned);
    });
}

unsafe extern "C" fn drop_unconsumed(capsule: *mut ffi::PyObject) {
    // SAFETY: called by Python with the capsule being freed. A consumer renames what it takes, so a capsule that still has
    // its name still owns its tensor.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast::<DLManagedTensor>();
            if let Some(deleter) = (*managed).deleter {
                deleter(managed);
            }
        }
    }
}

/// A capsule over all of `share`'s bytes, compact and row-major. The share holds the view alive.
pub(crate) fn capsule<T: Borrow<View> + Send + 'static>(
    py: Python<'_>,
    share: T,
    device: (c_int, c_int),
    (code, bits): (u8, u8),
    shape: Shape,
) -> PyResult<Bound<'_, PyAny>> {
    let address = share.borrow().address() as *mut c_void;
    let mut owned = Box::new(Owned {
        managed: DLManagedTensor {
            tensor: DLTensor {
                data: address,
                device: DLDevice { device_type: device.0, device_id: device.1 },
                ndim: shape.len() as c_int,
                dtype: DLDataType { code, bits, lanes: 1 },
                shape: std::ptr::null_mut(),
                strides: std::ptr::null_mut(),
                byte_offset: 0,
            },
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(delete::<T>),
        },
        shape,
        share,
    });
    owned.managed.tensor.shape = owned.shape.as_mut_ptr();
    let raw = Box::into_raw(owned);
    // SAFETY: `raw` was just made and is reachable only from here; from the capsule on, the capsule or its consumer owns it.
    unsafe {
        (*raw).managed.manager_ctx = raw.cast();
        let managed = (&raw mut (*raw).managed).cast::<c_void>();
        let capsule = ffi::PyCapsule_New(managed, NAME.as_ptr(), Some(drop_unconsumed));
        if capsule.is_null() {
            drop(Box::from_raw(raw));
            return Err(PyErr::fetch(py));
        }
        Ok(Bound::from_owned_ptr(py, capsule))
    }
}
