//! The element types of the format.

use std::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal;)*) => {
        /// Element type of a tensor, as spelled in a safetensors header.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types)]
        #[non_exhaustive]
        pub enum DType { $($(#[$doc])* $variant,)* }

        impl DType {
            /// Every dtype of the format.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)*];

            /// The spelling in the header, such as `"BF16"`.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$variant => $name,)* }
            }

            /// Bits per element; below 8 several elements share a byte.
            pub const fn bits(self) -> u64 {
                match self { $(DType::$variant => $bits,)* }
            }

            /// The dtype spelled `name` in a header, if the format has one.
            pub fn parse(name: &str) -> Option<DType> {
                match name { $($name => Some(DType::$variant),)* _ => None }
            }
        }
    };
}

dtypes! {
    /// Boolean, one byte.
    BOOL = "BOOL", 8;
    /// MXFP4: E2M1, two elements a byte.
    F4 = "F4", 4;
    /// MXFP6, E2M3.
    F6_E2M3 = "F6_E2M3", 6;
    /// MXFP6, E3M2.
    F6_E3M2 = "F6_E3M2", 6;
    /// Unsigned byte.
    U8 = "U8", 8;
    /// Signed byte.
    I8 = "I8", 8;
    /// FP8, E5M2.
    F8_E5M2 = "F8_E5M2", 8;
    /// FP8, E4M3 (finite only).
    F8_E4M3 = "F8_E4M3", 8;
    /// Scale factor: E8M0.
    F8_E8M0 = "F8_E8M0", 8;
    /// FP8, E4M3 without negative zero.
    F8_E4M3FNUZ = "F8_E4M3FNUZ", 8;
    /// FP8, E5M2 without negative zero.
    F8_E5M2FNUZ = "F8_E5M2FNUZ", 8;
    /// Signed 16-bit integer.
    I16 = "I16", 16;
    /// Unsigned 16-bit integer.
    U16 = "U16", 16;
    /// IEEE half precision.
    F16 = "F16", 16;
    /// bfloat16.
    BF16 = "BF16", 16;
    /// Signed 32-bit integer.
    I32 = "I32", 32;
    /// Unsigned 32-bit integer.
    U32 = "U32", 32;
    /// IEEE single precision.
    F32 = "F32", 32;
    /// Complex of two F32.
    C64 = "C64", 64;
    /// IEEE double precision.
    F64 = "F64", 64;
    /// Signed 64-bit integer.
    I64 = "I64", 64;
    /// Unsigned 64-bit integer.
    U64 = "U64", 64;
}

impl DType {
    /// Alignment in bytes that an element needs in memory (1 for sub-byte types; 8 for C64: torch's
    /// `c10::complex<float>` is `alignas(8)`, although 4 is enough for C and numpy).
    pub const fn align(self) -> u64 {
        match self {
            _ if self.bits() < 8 => 1,
            _ => self.bits() / 8,
        }
    }

    /// Bytes that `elements` elements take; `None` if that overflows or is not a whole number of bytes.
    pub const fn nbytes(self, elements: u64) -> Option<u64> {
        match elements.checked_mul(self.bits()) {
            Some(bits) if bits % 8 == 0 => Some(bits / 8),
            _ => None,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
