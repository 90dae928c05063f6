//! Conversions between F16, BF16, F32 and F64 on the way out of a slab.
//!
//! They give what torch's `.to()` gives: the nearest value, and the even one of two that are equally near. Every
//! conversion goes by way of F32, as torch's do. So F64 to F16 or BF16 is rounded twice, and the result of the two is
//! torch's. Values that are too large become infinite. A NaN stays one, and keeps its sign and the higher bits of its
//! payload, as in a processor's own conversions. A NaN that becomes BF16 is always 0x7fc0. In torch the bits of a NaN
//! depend on the processor, and on the place in the tensor.

use crate::format::DType;
use std::marker::PhantomData;
use std::ptr;

/// A conversion between two of the four types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cast {
    from: DType,
    to: DType,
}

impl Cast {
    /// From one type to another one; `None` if they are the same, or one of them is not converted here.
    pub fn new(from: DType, to: DType) -> Option<Cast> {
        let known = |dtype| matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
        (from != to && known(from) && known(to)).then_some(Cast { from, to })
    }

    /// Bytes of an element in the slab.
    pub fn from_bytes(self) -> u64 {
        self.from.bits() / 8
    }

    /// Bytes of an element at the destination.
    pub fn to_bytes(self) -> u64 {
        self.to.bits() / 8
    }

    /// Does `work` with the conversion as a type.
    ///
    /// # Safety
    /// As for the work.
    pub(super) unsafe fn with(self, work: impl OfItem) {
        // SAFETY: the caller's promise.
        unsafe {
            match (self.from, self.to) {
                (DType::F16, DType::BF16) => work.run::<Converted<Half, Brain>>(),
                (DType::F16, DType::F32) => work.run::<Converted<Half, Single>>(),
                (DType::F16, DType::F64) => work.run::<Converted<Half, Double>>(),
                (DType::BF16, DType::F16) => work.run::<Converted<Brain, Half>>(),
                (DType::BF16, DType::F32) => work.run::<Converted<Brain, Single>>(),
                (DType::BF16, DType::F64) => work.run::<Converted<Brain, Double>>(),
                (DType::F32, DType::F16) => work.run::<Converted<Single, Half>>(),
                (DType::F32, DType::BF16) => work.run::<Converted<Single, Brain>>(),
                (DType::F32, DType::F64) => work.run::<Converted<Single, Double>>(),
                (DType::F64, DType::F16) => work.run::<Converted<Double, Half>>(),
                (DType::F64, DType::BF16) => work.run::<Converted<Double, Brain>>(),
                (DType::F64, DType::F32) => work.run::<Converted<Double, Single>>(),
                // `new` makes no other.
                _ => {}
            }
        }
    }
}

/// Something that is done with items of any type.
pub(super) trait OfItem {
    /// # Safety
    /// As what is done says.
    unsafe fn run<I: Item>(self);
}

/// An item on its way to its destination.
pub(super) trait Item {
    /// Its type at the destination: an array of bytes, which needs no alignment.
    type There: Copy;
    /// Its bytes in the slab.
    const FROM: usize;

    /// Moves one.
    ///
    /// # Safety
    /// Both sides are valid for one item. They need no alignment, and do not overlap.
    unsafe fn one(from: *const u8, to: *mut u8);

    /// Moves items that are contiguous on both sides.
    ///
    /// # Safety
    /// The same for all of them.
    unsafe fn row(from: *const u8, to: *mut u8, count: usize);
}

/// An item that stays as it is.
pub(super) struct Plain<T>(PhantomData<T>);

impl<T: Copy> Item for Plain<T> {
    type There = T;
    const FROM: usize = size_of::<T>();

    #[inline(always)]
    unsafe fn one(from: *const u8, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<T>().write_unaligned(from.cast::<T>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn row(from: *const u8, to: *mut u8, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { ptr::copy_nonoverlapping(from, to, count * size_of::<T>()) }
    }
}

/// An element of `A` that becomes one of `B`.
pub(super) struct Converted<A, B>(PhantomData<(A, B)>);

impl<A: Float, B: Float> Item for Converted<A, B> {
    type There = B::Bytes;
    const FROM: usize = size_of::<A::Bytes>();

    #[inline(always)]
    unsafe fn one(from: *const u8, to: *mut u8) {
        // SAFETY: the caller's promise. Arrays of bytes need no alignment.
        unsafe { to.cast::<B::Bytes>().write(B::rounded(A::single(from.cast::<A::Bytes>().read()))) }
    }

    #[inline(always)]
    unsafe fn row(from: *const u8, to: *mut u8, count: usize) {
        #[cfg(target_arch = "x86_64")]
        if count >= WIDE && std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the caller's promise, and the processor has AVX2.
            return unsafe { row_in_avx2::<A, B>(from, to, count) };
        }
        // SAFETY: the caller's promise.
        unsafe { row_of::<A, B>(from, to, count) }
    }
}

/// From so many elements on, wider registers are worth asking whether there are any.
#[cfg(target_arch = "x86_64")]
const WIDE: usize = 16;

/// # Safety
/// As for [`Item::row`]. The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn row_in_avx2<A: Float, B: Float>(from: *const u8, to: *mut u8, count: usize) {
    // SAFETY: the caller's promise.
    unsafe { row_of::<A, B>(from, to, count) }
}

/// # Safety
/// As for [`Item::row`].
#[inline(always)]
unsafe fn row_of<A: Float, B: Float>(from: *const u8, to: *mut u8, count: usize) {
    for i in 0..count {
        // SAFETY: the caller's promise.
        unsafe { Converted::<A, B>::one(from.add(i * size_of::<A::Bytes>()), to.add(i * size_of::<B::Bytes>())) }
    }
}

/// A floating-point type, by way of the bits of F32. Nothing branches, so that compilers make vector code of rows.
pub(super) trait Float {
    /// One in memory.
    type Bytes: Copy;
    /// The bits of the F32 that is nearest.
    fn single(bytes: Self::Bytes) -> u32;
    /// The value nearest to the F32 of these bits.
    fn rounded(bits: u32) -> Self::Bytes;
}

/// F16.
pub(super) struct Half;
/// BF16.
pub(super) struct Brain;
/// F32.
pub(super) struct Single;
/// F64.
pub(super) struct Double;

const SIGN: u32 = 1 << 31;
/// Infinity in F32. Larger values, without their sign, are NaNs.
const INFINITE: u32 = 0xff << 23;
/// The bit that makes a NaN a quiet one.
const QUIET: u32 = 1 << 22;
/// The exponents of F32 begin so much further down than those of F16.
const LOWER: u32 = (127 - 15) << 23;

impl Float for Half {
    type Bytes = [u8; 2];

    #[inline(always)]
    fn single(bytes: [u8; 2]) -> u32 {
        let bits = u32::from(u16::from_ne_bytes(bytes));
        let (sign, rest) = ((bits & 0x8000) << 16, bits & 0x7fff);
        let normal = (rest << 13) + LOWER;
        // Multiples of 2^-24, the distance of two F32 from 0.5 on. No subnormal F32 is needed, which could be slow, or 0.
        let subnormal = (f32::from_bits(0.5f32.to_bits() | rest) - 0.5).to_bits();
        let special = (rest << 13) | INFINITE | if rest > 0x7c00 { QUIET } else { 0 };
        sign | match rest {
            0x7c00.. => special,
            0x400.. => normal,
            _ => subnormal,
        }
    }

    #[inline(always)]
    fn rounded(bits: u32) -> [u8; 2] {
        /// 2^16: the first power that F16 does not have. Values that round to it become infinite by carrying into the
        /// exponent.
        const LARGE: u32 = (127 + 16) << 23;
        /// 2^-14, the smallest F16 that is normal.
        const NORMAL: u32 = (127 - 14) << 23;
        let (sign, rest) = ((bits & SIGN) >> 16, bits & !SIGN);
        let normal = rest.wrapping_sub(LOWER).wrapping_add(0xfff + ((rest >> 13) & 1)) >> 13;
        // From 0.5 on two F32 are 2^-24 apart, as subnormal F16 are: the addition rounds.
        let subnormal = (f32::from_bits(rest) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
        let special = 0x7c00 | if rest > INFINITE { 0x200 | ((rest >> 13) & 0x3ff) } else { 0 };
        let rounded = match rest {
            LARGE.. => special,
            NORMAL.. => normal,
            _ => subnormal,
        };
        ((sign | rounded) as u16).to_ne_bytes()
    }
}

impl Float for Brain {
    type Bytes = [u8; 2];

    #[inline(always)]
    fn single(bytes: [u8; 2]) -> u32 {
        u32::from(u16::from_ne_bytes(bytes)) << 16
    }

    #[inline(always)]
    fn rounded(bits: u32) -> [u8; 2] {
        let number = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let rounded = if bits & !SIGN > INFINITE { (INFINITE | QUIET) >> 16 } else { number };
        (rounded as u16).to_ne_bytes()
    }
}

impl Float for Single {
    type Bytes = [u8; 4];

    #[inline(always)]
    fn single(bytes: [u8; 4]) -> u32 {
        u32::from_ne_bytes(bytes)
    }

    #[inline(always)]
    fn rounded(bits: u32) -> [u8; 4] {
        bits.to_ne_bytes()
    }
}

impl Float for Double {
    type Bytes = [u8; 8];

    #[inline(always)]
    fn single(bytes: [u8; 8]) -> u32 {
        (f64::from_ne_bytes(bytes) as f32).to_bits()
    }

    #[inline(always)]
    fn rounded(bits: u32) -> [u8; 8] {
        f64::from(f32::from_bits(bits)).to_ne_bytes()
    }
}

#[cfg(all(test, not(loom)))]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    pub(crate) const FLOATS: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

    /// One row of elements, converted.
    pub(crate) fn converted(cast: Cast, from: &[u8]) -> Vec<u8> {
        struct Row<'a>(&'a [u8], &'a mut Vec<u8>);
        impl OfItem for Row<'_> {
            unsafe fn run<I: Item>(self) {
                // SAFETY: as many elements as there are on both sides.
                unsafe { I::row(self.0.as_ptr(), self.1.as_mut_ptr(), self.0.len() / I::FROM) }
            }
        }
        let mut to = vec![0xee; from.len() / cast.from_bytes() as usize * cast.to_bytes() as usize];
        // SAFETY: any slice and any vector.
        unsafe { cast.with(Row(from, &mut to)) };
        to
    }

    fn cast(from: DType, to: DType) -> Cast {
        Cast::new(from, to).unwrap()
    }

    /// The value of an F16 or BF16, by the definition of the formats.
    fn value(dtype: DType, bits: u16) -> f64 {
        let (fraction, bias) = if dtype == DType::F16 { (10, 15) } else { (7, 127) };
        let exponent = i32::from((bits & 0x7fff) >> fraction);
        let significand = f64::from(bits & ((1 << fraction) - 1));
        let unit = 2f64.powi(-fraction);
        let size = match exponent {
            0 => significand * unit * 2f64.powi(1 - bias),
            e if e == 2 * bias + 1 && significand > 0.0 => f64::NAN,
            e if e == 2 * bias + 1 => f64::INFINITY,
            e => (1.0 + significand * unit) * 2f64.powi(e - bias),
        };
        if bits & 0x8000 == 0 {
            size
        } else {
            -size
        }
    }

    /// The value nearest to `x` in F16 or BF16, by the definition of rounding.
    fn nearest(dtype: DType, x: f32) -> f64 {
        let (fraction, least, largest) = if dtype == DType::F16 { (10, -14, 15) } else { (7, -126, 127) };
        let x = f64::from(x);
        if x == 0.0 || !x.is_finite() {
            return x;
        }
        let unit = 2f64.powi((x.abs().log2().floor() as i32).max(least) - fraction);
        let rounded = (x / unit).round_ties_even() * unit;
        if rounded.abs() >= 2f64.powi(largest + 1) {
            f64::INFINITY.copysign(x)
        } else {
            rounded
        }
    }

    fn same(a: f64, b: f64) -> bool {
        (a.is_nan() && b.is_nan()) || a.to_bits() == b.to_bits()
    }

    #[test]
    fn every_small_float_becomes_its_value() {
        for dtype in [DType::F16, DType::BF16] {
            let bytes: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
            let single = converted(cast(dtype, DType::F32), &bytes);
            let double = converted(cast(dtype, DType::F64), &bytes);
            for bits in 0..=u16::MAX {
                let i = usize::from(bits);
                let a = f32::from_ne_bytes(single[4 * i..][..4].try_into().unwrap());
                let b = f64::from_ne_bytes(double[8 * i..][..8].try_into().unwrap());
                assert!(same(f64::from(a), value(dtype, bits)) && same(b, value(dtype, bits)), "{dtype} {bits:#x}");
            }
            let back = converted(cast(DType::F32, dtype), &single);
            for (bits, back) in (0..=u16::MAX).zip(back.chunks(2)) {
                let back = u16::from_ne_bytes([back[0], back[1]]);
                assert!(
                    bits == back || value(dtype, bits).is_nan() && value(dtype, back).is_nan(),
                    "{dtype} {bits:#x}"
                );
            }
        }
    }

    /// Every place where two F16 or BF16 meet, and the F32 right before and after it.
    #[test]
    fn halfway_between_two_the_even_one_is_taken() {
        for dtype in [DType::F16, DType::BF16] {
            let mut found: Vec<u32> = Vec::new();
            for bits in 0..0x7fffu16 {
                let (a, b) = (value(dtype, bits), value(dtype, bits + 1));
                let between = if b.is_infinite() { nearest_overflow(dtype) } else { f64::midpoint(a, b) };
                let single = (between as f32).to_bits();
                if a.is_finite() {
                    let three = [single - 1, single, single + 1];
                    found.extend(three.iter().flat_map(|bits| [*bits, bits | SIGN]));
                }
            }
            check_rounding(dtype, &found);
        }
    }

    /// Where rounding begins to give infinity.
    fn nearest_overflow(dtype: DType) -> f64 {
        if dtype == DType::F16 {
            65520.0
        } else {
            2f64.powi(128) - 2f64.powi(119)
        }
    }

    fn check_rounding(dtype: DType, singles: &[u32]) {
        let bytes: Vec<u8> = singles.iter().flat_map(|bits| bits.to_ne_bytes()).collect();
        let to = converted(cast(DType::F32, dtype), &bytes);
        let doubles: Vec<u8> = singles.iter().flat_map(|&b| f64::from(f32::from_bits(b)).to_ne_bytes()).collect();
        let of_doubles = converted(cast(DType::F64, dtype), &doubles);
        for (i, &bits) in singles.iter().enumerate() {
            let x = f32::from_bits(bits);
            let got = u16::from_ne_bytes([to[2 * i], to[2 * i + 1]]);
            assert!(same(value(dtype, got), nearest(dtype, x)), "{dtype} of {x:e} ({bits:#x}): {got:#x}");
            assert!(x.is_nan() || of_doubles[2 * i..][..2] == to[2 * i..][..2], "{dtype} of {x:e}");
        }
    }

    #[test]
    fn a_double_is_rounded_twice_as_torch_does_it() {
        // A little above the middle of 1 and the next BF16; the F32 nearest to it is the middle.
        let above = 1.0f64 + 2f64.powi(-8) + 2f64.powi(-40);
        let to = converted(cast(DType::F64, DType::BF16), &above.to_ne_bytes());
        assert_eq!(to, 0x3f80u16.to_ne_bytes());
        let above = 1.0f64 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(converted(cast(DType::F64, DType::F16), &above.to_ne_bytes()), 0x3c00u16.to_ne_bytes());
    }

    #[test]
    fn a_nan_keeps_its_sign_and_payload_except_in_bf16() {
        let short = |to: DType, bits: u32| {
            let bytes = converted(cast(DType::F32, to), &bits.to_ne_bytes());
            u16::from_ne_bytes(bytes.try_into().unwrap())
        };
        let long = |bits: u16| {
            let bytes = converted(cast(DType::F16, DType::F32), &bits.to_ne_bytes());
            u32::from_ne_bytes(bytes.try_into().unwrap())
        };
        let f16 = [0x7fc0_0000, 0xffc0_0000, 0x7f80_0001, 0x7fbf_ffff].map(|bits| short(DType::F16, bits));
        assert_eq!(f16, [0x7e00, 0xfe00, 0x7e00, 0x7fff]);
        assert_eq!([0x7e00, 0xfe01, 0x7c01].map(long), [0x7fc0_0000, 0xffc0_2000, 0x7fc0_2000]);
        let bf16 = [0x7f80_0001, 0xffff_ffff, 0x7fff_ffff].map(|bits| short(DType::BF16, bits));
        assert_eq!(bf16, [0x7fc0; 3]);
    }

    #[test]
    fn types_that_are_no_floats_and_conversions_to_itself_are_none() {
        for &dtype in DType::ALL {
            assert_eq!(Cast::new(dtype, dtype), None);
            assert_eq!(
                Cast::new(dtype, DType::F32).is_some(),
                FLOATS.contains(&dtype) && dtype != DType::F32,
                "{dtype}"
            );
        }
    }

    proptest! {
        /// Rows of any length, because long ones take wider registers.
        #[test]
        fn any_float_becomes_the_nearest(singles in prop::collection::vec(any::<u32>(), 1..200)) {
            check_rounding(DType::F16, &singles);
            check_rounding(DType::BF16, &singles);
        }

        #[test]
        fn what_goes_by_way_of_f32_is_the_same_in_two_steps(bytes in prop::collection::vec(any::<u8>(), 8..400)) {
            for from in FLOATS {
                for to in FLOATS {
                    let (Some(direct), Some(first), Some(second)) =
                        (Cast::new(from, to), Cast::new(from, DType::F32), Cast::new(DType::F32, to)) else { continue };
                    let bytes = &bytes[..bytes.len() / direct.from_bytes() as usize * direct.from_bytes() as usize];
                    prop_assert_eq!(converted(direct, bytes), converted(second, &converted(first, bytes)));
                }
            }
        }
    }
}
