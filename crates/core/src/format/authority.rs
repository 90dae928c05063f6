//! The index beside listed shard files: it says which of them counts for a name that is in two.
//!
//! Programs list the files of a checkpoint and leave its index out. A later writer may have put a new version of a tensor into
//! a new file, with the old one still in its own. Indexes are looked for only where a name is in two files.

use super::checkpoint::Seeded;
use super::choose::{is_hidden, is_index_name};
use super::index::Index;
use crate::error::Result;
use crate::store::{Origin, Watch};

/// The index that is asked for if the folder cannot be listed.
const USUAL: &str = "model.safetensors.index.json";

/// The indexes beside these files, read when they are first needed.
pub(super) struct Authority<'w> {
    files: Vec<Origin>,
    hasher: Seeded,
    watch: &'w Watch,
    indexes: Option<Vec<Says>>,
}

/// An index, and which of the listed files each of its files is.
struct Says {
    origin: Origin,
    index: Index,
    numbers: Vec<Option<u32>>,
}

/// The file that counts for a name, and the index that says so.
pub(super) struct Ruling {
    pub(super) file: u32,
    pub(super) index: Origin,
}

impl<'w> Authority<'w> {
    pub(super) fn new(files: &[Origin], hasher: &Seeded, watch: &'w Watch) -> Authority<'w> {
        Authority { files: files.to_vec(), hasher: hasher.clone(), watch, indexes: None }
    }

    /// The number of the listed file that counts for this name. `None` if no index says one, or two say different ones.
    ///
    /// # Errors
    /// [`Watch::too_much`] on the caller's thread: indexes are read.
    pub(super) fn file_of(&mut self, name: &str, hash: u64) -> Result<Option<Ruling>> {
        if self.watch.is_here() {
            return Err(self.watch.too_much());
        }
        if self.indexes.is_none() {
            self.indexes = Some(self.read());
        }
        let all = self.indexes.as_deref().unwrap_or_default().iter();
        let mut answers = all.filter_map(|says| Some((says.numbers[says.index.file_of(name, hash)? as usize]?, says)));
        let Some((file, first)) = answers.next() else { return Ok(None) };
        Ok(answers.all(|(other, _)| other == file).then(|| Ruling { file, index: first.origin.clone() }))
    }

    /// The names of the indexes that were read, for an error.
    pub(super) fn read_from(&self) -> Vec<String> {
        let all = self.indexes.as_deref().unwrap_or_default();
        all.iter().map(|says| says.origin.location().file_name().to_string_lossy().into_owned()).collect()
    }

    /// The indexes in the folders of the files. One that cannot be read says nothing.
    fn read(&self) -> Vec<Says> {
        let mut origins: Vec<Origin> = Vec::new();
        let mut folders: Vec<Origin> = Vec::new();
        for file in &self.files {
            let folder = file.folder();
            if folders.contains(&folder) {
                continue;
            }
            match folder.names(self.watch) {
                Ok(names) => {
                    let names = names.unwrap_or_default();
                    let mut found: Vec<&str> = names.iter().filter_map(|name| name.to_str()).collect();
                    found.retain(|name| is_index_name(name) && !is_hidden(name));
                    found.sort_unstable();
                    origins.extend(found.into_iter().map(|name| file.beside(name)));
                }
                Err(_) => origins.push(file.beside(USUAL)),
            }
            folders.push(folder);
        }
        let says = |origin: Origin| {
            let index = Index::read(&origin, &self.hasher, self.watch).ok()?;
            let of = |name: &String| {
                let meant = origin.beside(name);
                self.files.iter().position(|file| *file == meant).map(|number| number as u32)
            };
            let numbers = index.files.iter().map(of).collect();
            Some(Says { origin, index, numbers })
        };
        origins.into_iter().filter_map(says).collect()
    }
}
