//! Saving: tensors of this process become safetensors files.
//!
//! A [`SavePlan`] says what stands where; a [`Save`] writes it. A crew of threads takes the files' chunks in turn. To
//! stable storage, each thread takes a slab of the ring for a chunk, fills it (on the CPU by copying, from a GPU by the
//! driver), writes it with O_DIRECT and gives it back. One thread fills while others write. To the page cache, tensors
//! in memory of this process are written from where they are. The last thread to finish gives the files their names.
//! Until then there is nothing that could be taken for a checkpoint, and the old files are untouched.
//!
//! Tensors that are not in memory as the file needs them ([`At::Late`]) are requested when their turn comes, from the
//! thread that waits for the save: no thread of the crew calls foreign code. A chunk takes its slab after its late
//! tensors are there. So nothing holds staging while a tensor is made. Making it may take long, and may itself load or
//! save.
//!
//! The owner may change its tensors when all bytes have left them ([`Save::copied`]): when everything is written, or, with a
//! [`Snapshot`](snapshot), when everything is in memory of this process.
//!
//! The slabs, one per thread of the crew, and the late tensors that are not written yet bound the memory: each of both has
//! `staging` at most, or what one chunk needs. The stall timeout bounds how long a write may hang, or other loads may keep the staging.

mod address;
mod before;
mod bucket;
mod chunks;
mod crew;
mod files;
mod folder;
mod handle;
mod in_place;
mod journal;
mod late;
mod names;
mod objects;
mod output;
mod plan;
mod publication;
mod pushed;
mod service;
mod shared;
mod side_by_side;
mod snapshot;
mod target;

pub use bucket::Bucket;
pub use chunks::At;
pub use handle::{Save, SaveRequest, Wanted};
pub(crate) use output::Output;
pub use plan::{Arrangement, FilePlan, RankShare, SavePlan, Tensor};
pub use pushed::{PushRequest, PushedContent, PushedIndex};
pub use shared::SaveReport;
