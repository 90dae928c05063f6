//! One object in the cache: its data file, and its map.

mod claims;
mod marking;

use super::directory::{refused, Directory, PART};
use super::key::{object_id, CacheKey};
use super::lock::retried;
use super::map::{blocks, boot_tag, random, slots, MapHeader, Slot, BLOCK, MOST_BYTES, MOST_HEADER, SLOT};
use super::on_demand::{FileUse, OnDemandFile};
use super::open_locks::{LockedFile, OpenLock, OpenLocks};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Anonymous;
use crate::options::PAGE;
use crate::store::facts::facts_of;
use crate::sync::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Slots that are read at once.
const MANY: u32 = 8192;

/// True if a block is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockState {
    /// Its bytes are in the data file.
    There,
    /// They are not, and nobody is known to bring them.
    Missing,
    /// This number's entry is bringing them. 0: it has not said its number yet.
    Claimed(u32),
}

/// An object in the cache, open. As long as it is, nobody removes it.
///
/// A forked child has the parent's open files, and cannot use its parent's entries. If the parent drops an entry, its locks
/// end at once. If the parent is killed, they stay as long as a child that did not call
/// [`leave_to_parent`](super::leave_to_parent): its claims then look like the ones of a stopped process.
#[derive(Debug)]
pub(crate) struct CacheEntry {
    data_path: PathBuf,
    map_path: PathBuf,
    map: Arc<OnDemandFile>,
    data: Arc<OnDemandFile>,
    /// The data file past the page cache, once it was opened; `None`: that was refused.
    direct: OnceLock<Option<Arc<OnDemandFile>>>,
    direct_failed: AtomicBool,
    header: MapHeader,
    /// Where the slots begin.
    first_slot: u64,
    writable: bool,
    number: u32,
    claims: Mutex<Claims>,
    /// Held by the thread that changes states of blocks that are there.
    marking: Mutex<()>,
    process: u32,
    /// Dropped last.
    open_lock: OpenLock,
}

/// The blocks that an entry has claimed, and the map with their locks, which stays open meanwhile.
#[derive(Debug, Default)]
struct Claims {
    all: BTreeSet<u32>,
    /// The number of the silent holder of each block that was taken over.
    taken: BTreeMap<u32, u32>,
    map: Option<LockedFile>,
}

/// The process of an entry with this number.
pub(super) fn process_of(number: u32) -> u32 {
    number >> 16
}

/// The upper half of the numbers of this process. A forked child has another.
pub(super) fn own_process() -> u32 {
    static PROCESS: AtomicU64 = AtomicU64::new(0);
    let (known, id) = (PROCESS.load(Ordering::Relaxed), std::process::id());
    let process = if (known >> 32) as u32 == id {
        known
    } else {
        let fresh = u64::from(id) << 32 | u64::from(random() >> 16);
        PROCESS.compare_exchange(known, fresh, Ordering::Relaxed, Ordering::Relaxed).map_or_else(|now| now, |_| fresh)
    };
    process as u32
}

/// A number for an open entry. Those of a process have one upper half.
fn new_number() -> u32 {
    (own_process() << 16 | random() >> 16).max(1)
}

/// The outcome of opening an entry.
#[derive(Debug)]
pub(super) enum OpenedEntry {
    /// It is open.
    Entry(Box<CacheEntry>),
    /// It is not there.
    Nothing,
    /// It is not whole, and can be replaced; why.
    Leftover(String),
}

/// The names of an object's files.
pub(super) fn data_name(id: &str) -> String {
    format!("{id}.data")
}

/// The name of an object's map.
pub(super) fn map_name(id: &str) -> String {
    format!("{id}.map")
}

/// The header of the map in an open file, or the reason why that is no map.
pub(super) fn header_of(map: &File) -> io::Result<Result<(MapHeader, u64), &'static str>> {
    let mut bytes = vec![0; MOST_HEADER as usize];
    let mut got = 0;
    // A header of less than a page is the rule.
    for wanted in [PAGE as usize, MOST_HEADER as usize] {
        got += read_up_to(map, &mut bytes[got..wanted], got as u64)?;
        if let Ok(found) = MapHeader::parse(&bytes[..got]) {
            return Ok(Ok(found));
        }
    }
    Ok(MapHeader::parse(&bytes[..got]))
}

/// Reads from here on until the memory is full or the file ends. Returns how many bytes it read.
pub(super) fn read_up_to(file: &File, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

impl CacheEntry {
    /// Opens the entry of this name. Nobody removes it while it has one of `locks`.
    pub(super) fn open(locks: &Arc<OpenLocks>, folder: &Directory, id: &str, write: bool) -> Result<OpenedEntry> {
        let map_path = folder.path().join(map_name(id));
        let failed = |e: io::Error| Error::io("open the map", &e).at(&map_path);
        let Some(open) = retried(|| locks.hold(id).map_err(failed))? else {
            let stopped = "another process has been removing it for 1 s";
            return Err(Error::new(ErrorKind::Timeout, format!("cannot open the map: {stopped}")).at(&map_path));
        };
        let Some((map, map_found, writable)) = folder.open(&map_name(id), write)? else {
            return Ok(OpenedEntry::Nothing);
        };
        let (header, first_slot) = match header_of(&map).map_err(failed)? {
            Ok(found) => found,
            Err(why) => return Ok(OpenedEntry::Leftover(why.to_owned())),
        };
        if map_found.len() != first_slot + u64::from(blocks(header.size)) * SLOT {
            return Ok(OpenedEntry::Leftover("the map has another size than its blocks".to_owned()));
        }
        let (data, data_found, also) = match folder.open(&data_name(id), writable)? {
            Some(data) => data,
            None => return Ok(OpenedEntry::Leftover("the map has no data".to_owned())),
        };
        if data_found.len() != header.size {
            let why = format!("the data file has {} bytes, not {}", data_found.len(), header.size);
            return Ok(OpenedEntry::Leftover(why));
        }
        let data_path = folder.path().join(data_name(id));
        Ok(OpenedEntry::Entry(Box::new(CacheEntry {
            map: OnDemandFile::new(map_path.clone(), map, &map_found, FileUse::of(writable)),
            data: OnDemandFile::new(data_path.clone(), data, &data_found, FileUse::of(also)),
            data_path,
            map_path,
            direct: OnceLock::new(),
            direct_failed: AtomicBool::new(false),
            header,
            first_slot,
            writable: writable && also,
            number: new_number(),
            claims: Mutex::default(),
            marking: Mutex::default(),
            process: std::process::id(),
            open_lock: open,
        })))
    }

    /// Makes the files of an entry. The caller holds its lock of making, and has removed leftovers.
    pub(super) fn make(folder: &Directory, id: &str, header: &MapHeader) -> Result<()> {
        let (data, map, part) = (data_name(id), map_name(id), format!("{}{PART}", map_name(id)));
        let path = folder.path().join(&data);
        if header.size > MOST_BYTES {
            let most = format!("the disk cache takes objects of up to {MOST_BYTES} bytes");
            return Err(Error::new(ErrorKind::Unsupported, most).with_values(MOST_BYTES, header.size).at(path));
        }
        let long = || Error::new(ErrorKind::Unsupported, "the address and the version are too long for the disk cache");
        let bytes = header.encode().ok_or_else(long)?;
        check_limit(header.size).map_err(|e| Error::write("set the size (ftruncate)", &e).at(&path))?;
        let made = || {
            folder.make(&data)?.set_len(header.size)?;
            let file = folder.make(&part)?;
            let size = bytes.len() as u64 + u64::from(blocks(header.size)) * SLOT;
            file.set_len(size)?;
            reserve(&file, size)?;
            file.write_all_at(&bytes, 0)?;
            folder.rename(&part, &map)
        };
        made().map_err(|e| {
            for name in [&part, &data] {
                let _left_behind = folder.remove(name);
            }
            Error::write("make a file of the disk cache", &e).at(&path)
        })
    }

    /// Records that it is used now, if it may be written.
    pub(super) fn touch(&self) {
        if let (true, Ok(map)) = (self.writable, self.map()) {
            // SAFETY: a descriptor that is held here; no times means now.
            let _not_recorded = unsafe { libc::futimens(map.as_raw_fd(), std::ptr::null()) };
        }
    }

    pub(super) fn header(&self) -> &MapHeader {
        &self.header
    }

    /// The location of the object.
    pub(super) fn key(&self) -> CacheKey {
        CacheKey { hash: self.header.key, shown: self.header.address.clone() }
    }

    /// The name of its files.
    pub(super) fn id(&self) -> String {
        object_id(&self.header.key, &self.header.version, self.header.size)
    }

    /// Bytes of the object.
    pub(crate) fn size(&self) -> u64 {
        self.header.size
    }

    /// Blocks of the object.
    pub(crate) fn blocks(&self) -> u32 {
        blocks(self.header.size)
    }

    /// The bytes of a block in the object.
    pub(crate) fn range(&self, block: u32) -> Range<u64> {
        let start = u64::from(block) * BLOCK;
        start.min(self.header.size)..(start + BLOCK).min(self.header.size)
    }

    /// The blocks that have bytes of this range.
    pub(crate) fn blocks_of(&self, range: Range<u64>) -> Range<u32> {
        let end = range.end.min(self.header.size);
        if range.start >= end {
            return 0..0;
        }
        (range.start / BLOCK) as u32..blocks(end)
    }

    /// The data file.
    pub(crate) fn data_path(&self) -> &Path {
        &self.data_path
    }

    /// The data file, for reads through the page cache.
    pub(super) fn file(&self) -> Result<Arc<File>> {
        self.check_process()?;
        self.data.get().map_err(|e| Error::io("open", &e).at(&self.data_path))
    }

    /// True if the data file has another name too, in huggingface_hub's cache.
    pub(super) fn is_linked(&self) -> Result<bool> {
        let found = self.file()?.metadata().map_err(|e| Error::io("stat", &e).at(&self.data_path))?;
        Ok(found.nlink() > 1)
    }

    /// The device and the number of the data file.
    pub(super) fn data_identity(&self) -> (u64, u64) {
        self.data.identity()
    }

    /// Does something to the names of the files while nobody else has the entry open; `None`: somebody has.
    pub(super) fn alone<T>(&self, work: impl FnOnce() -> T) -> Result<Option<T>> {
        self.open_lock.alone(work).map_err(|e| self.failed("lock the entry", &e))
    }

    fn map(&self) -> Result<Arc<File>> {
        self.check_process()?;
        self.map.get().map_err(|e| self.failed("open the map", &e))
    }

    /// The map, to be written.
    fn map_to_write(&self) -> Result<Arc<File>> {
        self.check_process()?;
        self.map.get().map_err(|e| Error::write("open the map", &e).at(&self.map_path))
    }

    /// True if another entry of this map is open, in whatever process. Where nobody can say so, one may be.
    pub(super) fn is_open_elsewhere(&self) -> bool {
        self.open_lock.is_shared()
    }

    /// True if blocks can be claimed and written.
    pub(crate) fn is_writable(&self) -> bool {
        self.writable
    }

    /// The number of this entry in claims. Each open entry has its own.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// True if all blocks are there.
    pub(crate) fn is_complete(&self) -> Result<bool> {
        let mut complete = true;
        self.each_slot(0..self.blocks(), |_, slot| {
            complete &= slot.crc().is_some();
            complete
        })?;
        Ok(complete)
    }

    /// The bytes that are there, in order; neighbours are one range.
    pub(crate) fn there(&self) -> Result<Vec<Range<u64>>> {
        let mut found: Vec<Range<u64>> = Vec::new();
        self.each_slot(0..self.blocks(), |block, slot| {
            if slot.crc().is_some() {
                let range = self.range(block);
                match found.last_mut().filter(|last| last.end == range.start) {
                    Some(last) => last.end = range.end,
                    None => found.push(range),
                }
            }
            true
        })?;
        Ok(found)
    }

    /// The CRC32C of each block; `None`: it is not there.
    pub(super) fn checksums(&self) -> Result<Vec<Option<u32>>> {
        let mut found = Vec::with_capacity(self.blocks() as usize);
        self.each_slot(0..self.blocks(), |_, slot| {
            found.push(slot.crc());
            true
        })?;
        Ok(found)
    }

    /// Writes the bytes of a block, which are all of them, and ends the claim, even if it fails. The block need not be claimed.
    /// One that is there stays as it is.
    ///
    /// # Errors
    /// `NoSpace`, `Write`: the block is missing. `Permission`: the cache is read-only.
    pub(crate) fn write(&self, block: u32, bytes: &[u8]) -> Result<()> {
        self.check(&(block..block + 1))?;
        let written = self.write_block(block, bytes);
        self.release(block);
        written
    }

    fn write_block(&self, block: u32, bytes: &[u8]) -> Result<()> {
        let range = self.range(block);
        if !self.writable {
            return Err(refused("it is read-only").at(&self.data_path));
        }
        if bytes.len() as u64 != range.end - range.start {
            let e = Error::new(ErrorKind::Internal, "a block is written with another size than it has");
            return Err(e.with_values(range.end - range.start, bytes.len() as u64).at(&self.data_path).range(range));
        }
        if self.slot(block)?.crc().is_some() {
            return Ok(());
        }
        if self.is_linked()? {
            let why = "huggingface_hub's cache has this file too, and its readers must not see a write";
            return Err(Error::new(ErrorKind::Unsupported, why).at(&self.data_path).range(range));
        }
        let crc = crc32c::crc32c(bytes);
        let failed = |e: io::Error| Error::write("write a block", &e).at(&self.data_path).range(range.clone());
        check_limit(range.end).map_err(failed)?;
        self.write_data(bytes, range.start).map_err(failed)?;
        self.set(block, Slot::Written(crc))
    }

    fn write_data(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        // The end of the last block would be written as a whole page, past the end of the file.
        let aligned = bytes.len() as u64 % PAGE == 0 && bytes.as_ptr().addr() as u64 % PAGE == 0;
        if aligned && !self.direct_failed.load(Ordering::Relaxed) {
            if let Some(direct) = self.direct.get_or_init(|| self.kept_direct()) {
                match direct.get()?.write_all_at(bytes, at) {
                    Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
                        self.direct_failed.store(true, Ordering::Relaxed);
                    }
                    written => return written,
                }
            }
        }
        self.data.get()?.write_all_at(bytes, at)
    }

    fn kept_direct(&self) -> Option<Arc<OnDemandFile>> {
        let direct = self.open_direct(true)?;
        let found = direct.metadata().ok()?;
        Some(OnDemandFile::new(self.data_path.clone(), direct, &found, FileUse::WriteDirect))
    }

    /// The data file past the page cache, if its file system has that for whole pages.
    pub(super) fn open_direct(&self, write: bool) -> Option<File> {
        let data = self.file().ok()?;
        let own = OwnedFd::from(data.try_clone().ok()?);
        let unit = facts_of(&own, &self.data_path).ok()?.lanes.unit?;
        let flags = libc::O_DIRECT | libc::O_NOFOLLOW;
        let direct = File::options().read(!write).write(write).custom_flags(flags).open(&self.data_path).ok()?;
        let (one, other) = (direct.metadata().ok()?, data.metadata().ok()?);
        (unit <= PAGE && (one.dev(), one.ino()) == (other.dev(), other.ino())).then_some(direct)
    }

    /// Waits until the bytes of all written blocks are on the disk, those of other processes too, and marks these blocks. The marks
    /// are on the disk when it returns how many there were.
    ///
    /// # Errors
    /// The file system lost bytes: all blocks that were not synced are missing from now on.
    pub(crate) fn sync(&self) -> Result<u64> {
        self.check(&(0..0))?;
        if !self.writable {
            return Ok(0);
        }
        let mut written = Vec::new();
        self.each_slot(0..self.blocks(), |block, slot| {
            if matches!(slot, Slot::Written(_)) {
                written.push((block, slot));
            }
            true
        })?;
        if written.is_empty() {
            return Ok(0);
        }
        let synced = self.file()?.sync_data();
        let marking = self.marking()?;
        let map = self.map_to_write()?;
        let mut count = 0;
        for run in written.chunk_by(|one, next| one.0 + 1 == next.0) {
            let mut now = Vec::with_capacity(run.len());
            self.each_slot(run[0].0..run[0].0 + run.len() as u32, |_, slot| {
                now.push(slot);
                true
            })?;
            let same: Vec<_> =
                run.iter().zip(now).filter(|(before, now)| before.1 == *now).map(|(one, _)| *one).collect();
            for run in same.chunk_by(|one, next| one.0 + 1 == next.0) {
                let slots: Vec<u8> = run
                    .iter()
                    .flat_map(|(_, slot)| match (slot, &synced) {
                        (Slot::Written(crc), Ok(())) => Slot::Synced(*crc).encode(boot_tag()),
                        // After an error the kernel takes the bytes for written, and drops them.
                        _ => Slot::Missing.encode(boot_tag()),
                    })
                    .collect();
                let failed = |e: io::Error| Error::write("mark blocks", &e).at(&self.map_path);
                map.write_all_at(&slots, self.slot_at(run[0].0)).map_err(failed)?;
                count += run.len() as u64;
            }
        }
        drop(marking);
        synced.map_err(|e| Error::write("write it to the disk (fdatasync)", &e).at(&self.data_path))?;
        // Otherwise a loss of power takes the marks back, and all of it is received again.
        map.sync_data().map_err(|e| Error::write("write it to the disk (fdatasync)", &e).at(&self.map_path))?;
        Ok(count)
    }

    /// Reads these bytes through the page cache. The caller knows that their blocks are there.
    pub(crate) fn read(&self, range: Range<u64>, into: &mut [u8]) -> Result<()> {
        debug_assert_eq!(range.end - range.start, into.len() as u64);
        let failed = |e: Error| e.at(&self.data_path).range(range.clone());
        match read_up_to(&*self.file()?, into, range.start) {
            Ok(got) if got == into.len() => Ok(()),
            Ok(got) => Err(failed(
                Error::new(ErrorKind::Truncated, "the data file ends before these bytes")
                    .with_values(into.len() as u64, got as u64),
            )),
            Err(e) => Err(failed(Error::io("read", &e))),
        }
    }

    /// True if a block's bytes on the disk have its CRC32C, or it is not there.
    pub(crate) fn verify(&self, block: u32) -> Result<bool> {
        self.check(&(block..block + 1))?;
        let range = self.range(block);
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let Some(crc) = self.slot(block)?.crc() else { return Ok(true) };
        self.read(range, &mut bytes)?;
        Ok(crc32c::crc32c(&bytes) == crc)
    }

    /// The same for a run of blocks, past the page cache where that is possible: the bytes are those on the disk, and what is
    /// resident stays. Returns the bytes that were compared, and the ranges of bad blocks. With `forget` these are missing from
    /// now on.
    pub(super) fn verify_run(&self, run: Range<u32>, forget: bool) -> Result<(u64, Vec<Range<u64>>)> {
        let memory = Anonymous::new(BLOCK)?;
        let direct = self.open_direct(false);
        let (mut compared, mut bad) = (0, Vec::new());
        for block in run.start..run.end.min(self.blocks()) {
            let Some(crc) = self.slot(block)?.crc() else { continue };
            let range = self.range(block);
            let len = (range.end - range.start) as usize;
            // SAFETY: the memory is this function's own, and has at least a block.
            let all = unsafe { std::slice::from_raw_parts_mut(memory.at(), memory.len()) };
            // A direct read ends at a page, or at the end of the file.
            let pages = len.next_multiple_of(PAGE as usize);
            let read = direct.as_ref().map(|direct| read_up_to(direct, &mut all[..pages], range.start));
            let is_read = matches!(read, Some(Ok(got)) if got >= len);
            // A block that the disk does not give is as bad as one with other bytes.
            let is_lost = !is_read && self.read(range.clone(), &mut all[..len]).is_err();
            compared += len as u64;
            if is_lost || crc32c::crc32c(&all[..len]) != crc {
                if forget {
                    self.forget(block)?;
                }
                bad.push(range);
            }
        }
        Ok((compared, bad))
    }

    /// True if these bytes, which are all of a block, have its CRC32C, or it is not there.
    pub(crate) fn verify_bytes(&self, block: u32, bytes: &[u8]) -> Result<bool> {
        self.check(&(block..block + 1))?;
        Ok(self.slot(block)?.crc().is_none_or(|crc| crc == crc32c::crc32c(bytes)))
    }

    /// Makes a block missing.
    pub(crate) fn forget(&self, block: u32) -> Result<()> {
        self.check(&(block..block + 1))?;
        if !self.writable {
            return Err(refused("it is read-only").at(&self.map_path));
        }
        let marking = self.marking()?;
        self.set(block, Slot::Missing)?;
        drop(marking);
        // Otherwise a loss of power while it is written anew could bring its old state back.
        let map = self.map_to_write()?;
        map.sync_data().map_err(|e| Error::write("write it to the disk (fdatasync)", &e).at(&self.map_path))
    }

    /// Makes all blocks missing.
    pub(super) fn forget_all(&self) -> Result<()> {
        self.check(&(0..0))?;
        if !self.writable {
            return Err(refused("it is read-only").at(&self.map_path));
        }
        let slots = Slot::Missing.encode(boot_tag()).repeat(self.blocks() as usize);
        let (marking, map) = (self.marking()?, self.map_to_write()?);
        let written = map.write_all_at(&slots, self.first_slot);
        drop(marking);
        let written = written.and_then(|()| map.sync_data());
        written.map_err(|e| Error::write("write the states of the blocks", &e).at(&self.map_path))
    }

    /// Checks that these are blocks of the object, and that this process opened it.
    fn check(&self, run: &Range<u32>) -> Result<()> {
        self.check_process()?;
        if run.start > run.end || run.end > self.blocks() {
            let e = Error::new(ErrorKind::Internal, "blocks that the object does not have");
            return Err(e.with_values(u64::from(self.blocks()), u64::from(run.end)).at(&self.map_path));
        }
        Ok(())
    }

    /// Checks that this process opened it. The open files of its parent have the parent's locks, and after
    /// [`leave_to_parent`](super::leave_to_parent) they are other files.
    fn check_process(&self) -> Result<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let why = "a forked child cannot use its parent's part of the disk cache";
        Err(Error::new(ErrorKind::Forked, why).at(&self.map_path))
    }

    fn failed(&self, doing: &str, cause: &io::Error) -> Error {
        Error::io(doing, cause).at(&self.map_path)
    }

    fn slot_at(&self, block: u32) -> u64 {
        self.first_slot + u64::from(block) * SLOT
    }

    fn slot(&self, block: u32) -> Result<Slot> {
        let mut found = Slot::Missing;
        self.each_slot(block..block + 1, |_, slot| {
            found = slot;
            true
        })?;
        Ok(found)
    }

    fn set(&self, block: u32, slot: Slot) -> Result<()> {
        let failed = |e: io::Error| Error::write("write the state of a block", &e).at(&self.map_path);
        self.map_to_write()?.write_all_at(&slot.encode(boot_tag()), self.slot_at(block)).map_err(failed)
    }

    /// Gives the slots of a run to `each`, until it returns false.
    fn each_slot(&self, run: Range<u32>, mut each: impl FnMut(u32, Slot) -> bool) -> Result<()> {
        let map = self.map()?;
        let mut bytes = vec![0; run.len().min(MANY as usize) * SLOT as usize];
        let mut at = run.start;
        while at < run.end {
            let count = (run.end - at).min(MANY);
            let part = &mut bytes[..count as usize * SLOT as usize];
            // A map that was cut has no blocks behind its end.
            let got = read_up_to(&map, part, self.slot_at(at)).map_err(|e| self.failed("read the map", &e))?;
            part[got / SLOT as usize * SLOT as usize..].fill(0);
            for (block, slot) in (at..).zip(slots(part, boot_tag())) {
                if !each(block, slot) {
                    return Ok(());
                }
            }
            at += count;
        }
        Ok(())
    }
}

impl Drop for CacheEntry {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            self.end_taken();
        }
    }
}

/// A limit of this process on the size of files. To exceed it is a signal that ends the process.
pub(super) fn check_limit(size: u64) -> io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: one structure is written.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if asked == 0 && limit.rlim_cur != libc::RLIM_INFINITY && size > limit.rlim_cur {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    Ok(())
}

/// Reserves the room of a map: later no disk is too full for a slot.
pub(super) fn reserve(file: &File, size: u64) -> io::Result<()> {
    // SAFETY: a plain system call on a descriptor of ours.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, size as i64) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        e if matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::EIO)) => Err(e),
        _ => Ok(()),
    }
}
