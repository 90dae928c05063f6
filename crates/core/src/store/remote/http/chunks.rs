//! Bodies that come in chunks (RFC 9112, 7.1): what stands between the bytes.

use std::io;

/// The longest line between two chunks: a size, what a server adds to it, or a field behind the last chunk.
const LONGEST_LINE: usize = 8 << 10;

/// How far a body in chunks has come.
#[derive(Debug, Default)]
pub(in crate::store::remote) struct Chunks {
    at: ChunkStep,
    /// Bytes of this chunk that are still to come.
    left: u64,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum ChunkStep {
    /// The size of a chunk.
    #[default]
    Size,
    Bytes,
    /// The line that ends behind the bytes of a chunk.
    End,
    /// The fields behind the last chunk.
    Fields,
    Over,
}

impl Chunks {
    /// Reads what stands between chunks at the beginning of these bytes: how many that are.
    ///
    /// # Errors
    /// `InvalidData` if it is something else.
    pub(in crate::store::remote) fn read(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut used = 0;
        loop {
            let rest = &bytes[used..];
            match self.at {
                ChunkStep::Bytes | ChunkStep::Over => return Ok(used),
                ChunkStep::Size | ChunkStep::Fields => {
                    let Some(end) = rest.windows(2).position(|two| two == b"\r\n") else {
                        // A server that sends no chunks is known at once.
                        if self.at == ChunkStep::Size && !rest.is_empty() {
                            size(rest.strip_suffix(b"\r").unwrap_or(rest))?;
                        }
                        if rest.len() > LONGEST_LINE {
                            return Err(wrong("a line is too long"));
                        }
                        return Ok(used);
                    };
                    used += end + 2;
                    self.at = match (self.at, end) {
                        (ChunkStep::Fields, 0) => ChunkStep::Over,
                        (ChunkStep::Fields, _) => ChunkStep::Fields,
                        _ => {
                            self.left = size(&rest[..end])?;
                            if self.left == 0 {
                                ChunkStep::Fields
                            } else {
                                ChunkStep::Bytes
                            }
                        }
                    };
                }
                ChunkStep::End => match rest {
                    [b'\r', b'\n', ..] => (used, self.at) = (used + 2, ChunkStep::Size),
                    [] | [b'\r'] => return Ok(used),
                    _ => return Err(wrong("a chunk is longer than its size")),
                },
            }
        }
    }

    /// Bytes that follow at once; 0: something else is to be read first, or it is over.
    pub(in crate::store::remote) fn left(&self) -> u64 {
        self.left
    }

    /// Whether nothing follows.
    pub(in crate::store::remote) fn is_over(&self) -> bool {
        self.at == ChunkStep::Over
    }

    /// So many bytes of the chunk came.
    pub(in crate::store::remote) fn took(&mut self, bytes: u64) {
        self.left -= bytes.min(self.left);
        if self.left == 0 && self.at == ChunkStep::Bytes {
            self.at = ChunkStep::End;
        }
    }
}

/// The bytes of a body that has begun so.
pub(in crate::store::remote) fn begun(mut rest: &[u8]) -> Vec<u8> {
    let (mut chunks, mut body) = (Chunks::default(), Vec::new());
    while let Ok(used) = chunks.read(rest) {
        rest = &rest[used..];
        let part = chunks.left().min(rest.len() as u64);
        if part == 0 {
            break;
        }
        body.extend_from_slice(&rest[..part as usize]);
        rest = &rest[part as usize..];
        chunks.took(part);
    }
    body
}

/// The size that a line says: hexadecimal digits, and perhaps something behind them.
fn size(line: &[u8]) -> io::Result<u64> {
    let digits = line.split(|b| *b == b';').next().unwrap_or_default().trim_ascii_end();
    let is_size = !digits.is_empty() && digits.iter().all(u8::is_ascii_hexdigit);
    let size = std::str::from_utf8(digits).ok().filter(|_| is_size).and_then(|text| u64::from_str_radix(text, 16).ok());
    size.ok_or_else(|| wrong("a chunk has no size"))
}

fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the chunked body is broken: {what}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The bytes of a body that comes in parts of `part` bytes, and whether it is over.
    fn decoded(text: &[u8], part: usize) -> io::Result<(Vec<u8>, bool)> {
        let (mut chunks, mut body, mut held) = (Chunks::default(), Vec::new(), Vec::new());
        for part in text.chunks(part) {
            held.extend_from_slice(part);
            loop {
                let used = chunks.read(&held)?;
                held.drain(..used);
                let part = chunks.left().min(held.len() as u64) as usize;
                if part == 0 {
                    break;
                }
                body.extend(held.drain(..part));
                chunks.took(part as u64);
            }
        }
        Ok((body, chunks.is_over() && held.is_empty()))
    }

    #[test]
    fn bytes_are_found_wherever_a_body_is_cut() {
        let text = b"5\r\nhello\r\n00A;name=\"x\"\r\n, \r\n0\r\nwor\r\n2 \r\nld\r\n0\r\nX: y\r\nZ: w\r\n\r\n";
        for part in 1..=text.len() {
            assert_eq!(decoded(text, part).unwrap(), (b"hello, \r\n0\r\nworld".to_vec(), true), "{part}");
        }
        for cut in 0..text.len() {
            assert!(!decoded(&text[..cut], 7).unwrap().1, "{cut}");
        }
        assert_eq!(begun(&text[..12]), b"hello");
        assert_eq!(begun(text), b"hello, \r\n0\r\nworld");
    }

    #[test]
    fn what_is_no_chunk_is_an_error() {
        for text in ["x\r\n", "-1\r\n", "5\r\nhello!\r\n", "fffffffffffffffff\r\n", "\r\n"] {
            for part in [1, 100] {
                assert!(decoded(text.as_bytes(), part).is_err(), "{text:?}");
            }
        }
        assert!(decoded(&[b"1;", &[b'x'; 2 * LONGEST_LINE][..]].concat(), 100).is_err());
    }
}
