//! Checkpoints for tests: written here, by hand or with many tensors, without the crate under test.
#![allow(dead_code, clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Processor time of this thread: what other programs do on the machine does not count.
pub(crate) fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes one timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A shard file's bytes: length, `json`, then `data` bytes.
pub(crate) fn shard(json: &[u8], data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json);
    let start = bytes.len();
    bytes.resize(start + data, 0);
    // A row of bytes at a time: one at a time is slow where nothing is optimised.
    let row: Vec<u8> = (start..start + (64 << 10)).map(|i| i as u8).collect();
    bytes[start..].chunks_mut(row.len()).for_each(|piece| piece.copy_from_slice(&row[..piece.len()]));
    bytes
}

/// A well-formed header for U8 vectors of these names and lengths, and the size of its data section.
pub(crate) fn header(tensors: &[(&str, u64)]) -> (String, usize) {
    let mut at = 0;
    let entries: Vec<String> = tensors
        .iter()
        .map(|(name, n)| {
            let text =
                format!("{}:{{\"dtype\":\"U8\",\"shape\":[{n}],\"data_offsets\":[{at},{}]}}", quote(name), at + n);
            at += n;
            text
        })
        .collect();
    (format!("{{{}}}", entries.join(",")), at as usize)
}

/// Writes a well-formed shard file of U8 vectors.
pub(crate) fn write(path: impl AsRef<Path>, tensors: &[(&str, u64)]) {
    let (json, data) = header(tensors);
    fs::write(path, shard(json.as_bytes(), data)).unwrap();
}

/// Writes an index of (tensor, file) pairs.
pub(crate) fn write_index(path: impl AsRef<Path>, map: &[(&str, &str)], total_size: &str) {
    let map: Vec<String> = map.iter().map(|(t, f)| format!("{}:{}", quote(t), quote(f))).collect();
    let text = format!("{{\"metadata\":{{\"total_size\":{total_size}}},\"weight_map\":{{{}}}}}", map.join(","));
    fs::write(path, text).unwrap();
}

pub(crate) fn quote(text: &str) -> String {
    serde_json::to_string(text).unwrap()
}

/// Writes the names of a quantised mixture of experts, `tensors` of them over `files` shard files with an index: 4 bytes
/// each, about 100 bytes of header, which is 37 MB for 371,474.
pub(crate) fn write_many(folder: &Path, tensors: usize, files: usize) -> PathBuf {
    let part = ["gate_proj.weight", "up_proj.weight", "down_proj.weight", "gate_proj.weight_scale"];
    let mut map = Vec::with_capacity(tensors);
    for f in 0..files {
        let file = format!("model-{:05}-of-{files:05}.safetensors", f + 1);
        let (from, to) = (f * tensors / files, (f + 1) * tensors / files);
        let names: Vec<String> = (from..to)
            .map(|i| format!("model.layers.{}.mlp.experts.{}.{}", i / 1024, i / 4 % 256, part[i % 4]))
            .collect();
        let list: Vec<(&str, u64)> = names.iter().map(|n| (n.as_str(), 4)).collect();
        write(folder.join(&file), &list);
        map.extend(names.into_iter().map(|n| (n, file.clone())));
    }
    let index = folder.join("model.safetensors.index.json");
    let pairs: Vec<(&str, &str)> = map.iter().map(|(n, f)| (n.as_str(), f.as_str())).collect();
    write_index(&index, &pairs, &(tensors * 4).to_string());
    index
}
