//! Stands for the crate `crc-fast`. `object_store` uses one checksum of it, for uploads, which Penstock does not make. That
//! crate exports functions for C from every library that it is linked into, and brings large tables.

/// A checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrcAlgorithm {
    /// CRC-64/NVME.
    Crc64Nvme,
}

/// A checksum of bytes that come in parts.
#[derive(Debug, Clone)]
pub struct Digest(u64);

impl Digest {
    /// Of no bytes yet.
    pub fn new(algorithm: CrcAlgorithm) -> Digest {
        let CrcAlgorithm::Crc64Nvme = algorithm;
        Digest(u64::MAX)
    }

    /// Takes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        /// The polynomial, its lowest power first.
        const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
        for byte in bytes {
            self.0 ^= u64::from(*byte);
            for _ in 0..8 {
                self.0 = self.0 >> 1 ^ if self.0 & 1 == 1 { POLYNOMIAL } else { 0 };
            }
        }
    }

    /// Of all bytes that came.
    pub fn finalize(&self) -> u64 {
        !self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_the_catalogue() {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(b"1234");
        digest.update(b"56789");
        assert_eq!(digest.finalize(), 0xae8b_1486_0a79_9888);
    }
}
