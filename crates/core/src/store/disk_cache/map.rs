//! The bytes of a map file: a header, and one slot of 8 bytes per block. Pure.
//!
//! | bytes | header (little-endian) |
//! |---|---|
//! | 0..8 | magic |
//! | 8..12, 12..16 | format, block size |
//! | 16..24 | size of the object |
//! | 24..28 | length of the JSON |
//! | 28..32 | CRC32C of the header and the JSON, with zeros here |
//! | 32..64 | hash of the key |
//! | 64.. | JSON: address, version, time |
//!
//! The slots begin at the next multiple of 4096. A slot is a tag of 32 bits and a value of 32 bits. A new file is sparse: its
//! slots are zero, so missing.

use crate::options::PAGE;
use ring::rand::{SecureRandom, SystemRandom};
use serde_json::{json, Value};
use std::ops::Range;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Bytes of a block; the last one of an object is shorter.
pub(crate) const BLOCK: u64 = 1 << 20;
/// Bytes of the largest object: ext4 has no larger files. It bounds the size of a map.
pub(super) const MOST_BYTES: u64 = 1 << 44;
/// Bytes of a slot.
pub(super) const SLOT: u64 = 8;
/// The version of the format, of the folder and of maps.
pub(super) const FORMAT: u32 = 1;
/// Bytes of the longest header with its JSON.
pub(super) const MOST_HEADER: u64 = 64 << 10;

const MAGIC: [u8; 8] = *b"PnstkMap";
/// Bytes before the JSON.
const FIXED: usize = 64;
/// The CRC's place.
const CRC: Range<usize> = 28..32;

const MISSING: u32 = 0;
const SYNCED: u32 = 0x636e_7953;
const CLAIMED: u32 = 0x6d69_6c43;
const GIVEN_BACK: u32 = 0x6b63_6142;

/// The header of a map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MapHeader {
    pub(super) key: [u8; 32],
    pub(super) size: u64,
    pub(super) address: String,
    pub(super) version: String,
    /// When the map was made.
    pub(super) made: SystemTime,
}

impl MapHeader {
    /// The bytes before the slots; `None`: address and version are too long.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        let made = self.made.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let json = json!({"address": self.address, "version": self.version, "time": made}).to_string();
        let mut bytes = Vec::with_capacity(PAGE as usize);
        bytes.extend(MAGIC);
        bytes.extend(FORMAT.to_le_bytes());
        bytes.extend((BLOCK as u32).to_le_bytes());
        bytes.extend(self.size.to_le_bytes());
        bytes.extend((json.len() as u32).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.key);
        bytes.extend(json.as_bytes());
        let crc = crc32c::crc32c(&bytes);
        bytes[CRC].copy_from_slice(&crc.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(PAGE as usize), 0);
        (bytes.len() as u64 <= MOST_HEADER).then_some(bytes)
    }

    /// The header of a map that begins with these bytes, and where its slots begin; or the reason why they are no map.
    pub(super) fn parse(bytes: &[u8]) -> Result<(MapHeader, u64), &'static str> {
        let fixed = bytes.get(..FIXED).ok_or("the map is too short")?;
        let number = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
        if fixed[..8] != MAGIC {
            return Err("the map does not begin as a map");
        }
        if number(8) != FORMAT || u64::from(number(12)) != BLOCK {
            return Err("the map has another format");
        }
        let whole = FIXED + number(24) as usize;
        let json = bytes.get(FIXED..whole).ok_or("the header of the map is cut off")?;
        let crc = crc32c::crc32c_append(crc32c::crc32c(&fixed[..CRC.start]), &[0; 4]);
        if crc32c::crc32c_append(crc32c::crc32c_append(crc, &fixed[CRC.end..]), json) != number(CRC.start) {
            return Err("the checksum of the map's header is wrong");
        }
        let json: Value = serde_json::from_slice(json).map_err(|_| "the header of the map is no JSON")?;
        let text = |name: &str| json[name].as_str().map(str::to_owned).ok_or("the header of the map lacks a text");
        let time = json["time"].as_u64().unwrap_or_default();
        let mut key = [0; 32];
        key.copy_from_slice(&fixed[32..]);
        let size = u64::from(number(16)) | u64::from(number(20)) << 32;
        if size > MOST_BYTES {
            return Err("the map is of an object that is too large");
        }
        let made = UNIX_EPOCH.checked_add(Duration::from_secs(time)).unwrap_or(UNIX_EPOCH);
        let header = MapHeader { key, size, address: text("address")?, version: text("version")?, made };
        Ok((header, (whole as u64).next_multiple_of(PAGE)))
    }
}

/// Blocks of an object of this size.
pub(super) fn blocks(size: u64) -> u32 {
    size.div_ceil(BLOCK) as u32
}

/// The state of a block, as its slot has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Slot {
    /// Its bytes are not there.
    Missing,
    /// It is claimed by this number, as long as the lock is held.
    Claimed(u32),
    /// The same. Another one had taken it over and has ended that: the slot shows no progress of this number.
    GivenBack(u32),
    /// It was written since the machine started; its CRC32C.
    Written(u32),
    /// It is on the disk; its CRC32C.
    Synced(u32),
}

impl Slot {
    /// The slot of these bytes. One that was written before this boot is missing.
    pub(super) fn decode(bytes: [u8; SLOT as usize], boot: u32) -> Slot {
        let both = u64::from_le_bytes(bytes);
        match ((both >> 32) as u32, both as u32) {
            (SYNCED, crc) => Slot::Synced(crc),
            (CLAIMED, holder) => Slot::Claimed(holder),
            (GIVEN_BACK, holder) => Slot::GivenBack(holder),
            (tag, crc) if tag == boot && tag != MISSING => Slot::Written(crc),
            _ => Slot::Missing,
        }
    }

    /// Its bytes.
    pub(super) fn encode(self, boot: u32) -> [u8; SLOT as usize] {
        let (tag, value) = match self {
            Slot::Missing => (MISSING, 0),
            Slot::Claimed(holder) => (CLAIMED, holder),
            Slot::GivenBack(holder) => (GIVEN_BACK, holder),
            Slot::Written(crc) => (boot, crc),
            Slot::Synced(crc) => (SYNCED, crc),
        };
        (u64::from(tag) << 32 | u64::from(value)).to_le_bytes()
    }

    /// The CRC32C of its block, if the block is there.
    pub(super) fn crc(self) -> Option<u32> {
        match self {
            Slot::Written(crc) | Slot::Synced(crc) => Some(crc),
            Slot::Missing | Slot::Claimed(_) | Slot::GivenBack(_) => None,
        }
    }
}

/// The slots of these bytes.
pub(super) fn slots(bytes: &[u8], boot: u32) -> impl Iterator<Item = Slot> + '_ {
    bytes.chunks_exact(SLOT as usize).map(move |slot| {
        let mut own = [0; SLOT as usize];
        own.copy_from_slice(slot);
        Slot::decode(own, boot)
    })
}

/// The tag of blocks that were written since this machine started. Where the kernel does not say which start that was, no
/// other process has the tag.
pub(super) fn boot_tag() -> u32 {
    static TAG: OnceLock<u32> = OnceLock::new();
    *TAG.get_or_init(|| match std::fs::read("/proc/sys/kernel/random/boot_id") {
        Ok(boot) if !boot.is_empty() => free_tag(crc32c::crc32c(&boot)),
        _ => free_tag(random()),
    })
}

/// This number, or another one if it means something else.
fn free_tag(number: u32) -> u32 {
    if matches!(number, MISSING | SYNCED | CLAIMED | GIVEN_BACK) {
        1
    } else {
        number
    }
}

/// A number that is not 0.
pub(super) fn random() -> u32 {
    let mut bytes = [0; 4];
    match SystemRandom::new().fill(&mut bytes) {
        Ok(()) => u32::from_le_bytes(bytes).max(1),
        Err(_) => std::process::id(),
    }
}

/// Bytes as hexadecimal digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
