//! A file of this machine that is read once, piece by piece, and must stay as it is meanwhile.

use super::pread::{read_fully, MOST_PER_CALL};
use super::version::Identity;
use crate::error::{Error, ErrorKind, Result};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// See the module's documentation.
#[derive(Debug)]
pub struct SteadyFile {
    path: PathBuf,
    file: File,
    /// Its identity when it was opened.
    identity: Identity,
}

impl SteadyFile {
    /// Opens a file. Blocks, as long as its file system does.
    ///
    /// # Errors
    /// `NotFound`, `Permission`, `Io`; `Invalid` if it is no regular file.
    pub fn open(path: &Path) -> Result<SteadyFile> {
        let failed = |e: std::io::Error| Error::io("open the file", &e).at(path);
        // A pipe would wait for its other end.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            return Err(Error::invalid("this is no regular file").at(path));
        }
        let file = File::open(path).map_err(failed)?;
        let identity = Identity::of(&file).map_err(failed)?;
        Ok(SteadyFile { path: path.to_path_buf(), file, identity })
    }

    /// Bytes that it had when it was opened.
    pub fn size(&self) -> u64 {
        self.identity.size
    }

    /// Checks that the file has this content.
    ///
    /// # Errors
    /// `Io`; `Changed` if it has another one.
    pub(crate) fn check_content(&self, content: &[u8]) -> Result<()> {
        let mut bytes = vec![0; content.len()];
        let is_so = self.size() == content.len() as u64 && {
            // SAFETY: memory of this call, so many bytes.
            unsafe { self.read(0, bytes.as_mut_ptr(), bytes.len()) }?;
            bytes == content
        };
        match is_so {
            true => Ok(()),
            false => Err(Error::new(ErrorKind::Changed, "the file has changed since it was read").at(&self.path)),
        }
    }

    /// Reads `len` bytes from `offset` on.
    ///
    /// # Errors
    /// `Io`; `Changed` if the file has no such bytes any more.
    ///
    /// # Safety
    /// `to` may be written to for `len` bytes.
    pub(crate) unsafe fn read(&self, offset: u64, to: *mut u8, len: usize) -> Result<()> {
        let located = |e: Error| e.at(&self.path).range(offset..offset + len as u64);
        let mut place = [libc::iovec { iov_base: to.cast(), iov_len: len }];
        // SAFETY: as the caller promises.
        let read = unsafe { read_fully(self.file.as_raw_fd(), offset, &mut place, 0, MOST_PER_CALL) };
        let got = read.map_err(|stopped| located(Error::io("read", &stopped.cause)))?;
        if got == len as u64 {
            return Ok(());
        }
        self.verify()?;
        Err(located(Error::new(ErrorKind::Truncated, format!("the file system gave {got} of {len} bytes"))))
    }

    /// Compares the file, and what its path leads to, with what was opened.
    ///
    /// # Errors
    /// `Changed`; the errors of asking.
    pub(crate) fn verify(&self) -> Result<()> {
        let failed = |e: std::io::Error| Error::io("look at the file again", &e).at(&self.path);
        let now = Identity::of(&self.file).map_err(failed)?;
        self.identity.check(&now).map_err(|e| e.at(&self.path))?;
        let gone = |e: std::io::Error| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::new(ErrorKind::Changed, "the file was removed while it was read").at(&self.path)
            }
            _ => failed(e),
        };
        let there = Identity::of(&File::open(&self.path).map_err(gone)?).map_err(failed)?;
        self.identity.check(&there).map_err(|e| e.at(&self.path))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_written_replaced_or_removed_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let changes: [&dyn Fn(&Path); 3] = [
            &|path| std::fs::write(path, b"other bytes").unwrap(),
            &|path| {
                std::fs::write(path.with_extension("new"), b"content").unwrap();
                std::fs::rename(path.with_extension("new"), path).unwrap();
            },
            &|path| std::fs::remove_file(path).unwrap(),
        ];
        for change in changes {
            std::fs::write(&path, b"content").unwrap();
            let file = SteadyFile::open(&path).unwrap();
            let mut bytes = [0; 4];
            // SAFETY: memory of this test.
            unsafe { file.read(3, bytes.as_mut_ptr(), 4) }.unwrap();
            assert_eq!((&bytes, file.size()), (b"tent", 7));
            file.check_content(b"content").unwrap();
            for other in [&b"Content"[..], b"conten", b"content "] {
                assert_eq!(file.check_content(other).unwrap_err().kind(), ErrorKind::Changed);
            }
            file.verify().unwrap();
            change(&path);
            assert_eq!(file.verify().unwrap_err().kind(), ErrorKind::Changed);
        }
        assert_eq!(SteadyFile::open(folder.path()).unwrap_err().kind(), ErrorKind::Invalid);
    }

    #[test]
    fn a_file_that_shrinks_while_it_is_read_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, b"content").unwrap();
        let file = SteadyFile::open(&path).unwrap();
        std::fs::write(&path, b"con").unwrap();
        let mut bytes = [0; 7];
        // SAFETY: memory of this test.
        let e = unsafe { file.read(0, bytes.as_mut_ptr(), 7) }.unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Changed);
        assert!(e.to_string().contains("truncated from 7 to 3 bytes"), "{e}");
    }
}
