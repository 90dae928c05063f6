//! The owners and modes that a cache takes: others may not write.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

/// Others may write.
const OTHERS: u32 = 0o002;
/// The group may write.
const GROUP: u32 = 0o020;

/// The users that may write to a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Access {
    user: u32,
    /// The group of a cache that its group shares.
    group: Option<u32>,
}

impl Access {
    /// This user alone.
    pub(super) fn own() -> Access {
        // SAFETY: a plain system call.
        Access { user: unsafe { libc::geteuid() }, group: None }
    }

    /// This user, and the group of this folder; or why the group is refused.
    pub(super) fn shared(folder: &Metadata) -> Result<Access, String> {
        let (own, group) = (Access::own(), folder.gid());
        if own.user == 0 || groups().contains(&group) {
            return Ok(Access { group: Some(group), ..own });
        }
        Err(format!("this user is not in its group ({group})"))
    }

    /// The group that shares the cache.
    pub(super) fn group(self) -> Option<u32> {
        self.group
    }

    /// Checks the owner and the mode of a file or a folder; or says why it is refused.
    pub(super) fn check(self, found: &Metadata) -> Result<(), String> {
        let is_shared = self.group == Some(found.gid());
        if found.uid() != self.user && found.uid() != 0 && !is_shared {
            return Err(format!("it belongs to another user ({}), who can change it", found.uid()));
        }
        if found.mode() & OTHERS != 0 {
            return Err(format!("others may write to it (mode {:04o})", found.mode() & 0o7777));
        }
        if found.mode() & GROUP != 0 && !is_shared {
            return Err(match self.group {
                None => format!(
                    "its group may write to it (mode {:04o}), and the cache is not shared",
                    found.mode() & 0o7777
                ),
                Some(group) => format!("another group ({}) than the cache's ({group}) may write to it", found.gid()),
            });
        }
        Ok(())
    }

    /// True if nobody else than this user and root may write to it.
    pub(super) fn is_private(self, found: &Metadata) -> bool {
        (found.uid() == self.user || found.uid() == 0) && found.mode() & (OTHERS | GROUP) == 0
    }

    /// The mode of new files.
    pub(super) fn file_mode(self) -> u32 {
        if self.group.is_some() {
            0o660
        } else {
            0o600
        }
    }

    /// The mode of new folders. The group of what is made below a shared one is the cache's.
    pub(super) fn folder_mode(self) -> u32 {
        if self.group.is_some() {
            0o2770
        } else {
            0o700
        }
    }
}

/// The groups of this process.
fn groups() -> Vec<u32> {
    // SAFETY: the first call writes nothing, the second at most as many as the vector has.
    unsafe {
        let count = libc::getgroups(0, std::ptr::null_mut()).max(0);
        let mut found = vec![0; count as usize];
        let count = libc::getgroups(count, found.as_mut_ptr()).max(0);
        found.truncate(count as usize);
        found.push(libc::getegid());
        found
    }
}
