//! The names of objects and boards on a mirror: its server and its clients agree on them.

use crate::store::disk_cache::BLOCK;

/// The path of objects on a mirror.
pub const MIRRORED: &str = "cache";
/// The end of a board's name.
pub const BOARD: &str = ".blocks";

/// The ETag of the object of this name on a mirror.
pub fn mirrored_etag(id: &str) -> String {
    format!("\"{id}\"")
}

/// The ETag of its board. It is weak: the bits change with every block.
pub fn board_etag(id: &str) -> String {
    format!("W/\"{id}{BOARD}\"")
}

/// Bytes of the board of an object of this size: a bit for each block, the CRC32C of each block, and the number of the node
/// (little-endian).
pub fn board_size(size: u64) -> u64 {
    board_bits(size) + 4 * size.div_ceil(BLOCK) + 8
}

/// Bytes of its bits.
pub(crate) fn board_bits(size: u64) -> u64 {
    size.div_ceil(BLOCK).div_ceil(8)
}

/// The number of the node on a board.
pub(crate) fn board_node(board: &[u8]) -> u64 {
    board.last_chunk().copied().map_or(0, u64::from_le_bytes)
}
