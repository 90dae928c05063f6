//! Very many tensors.

mod checkpoints;

use penstock::format::Checkpoint;

/// 371,474 tensors: the largest count known of one checkpoint. The time is a claim about a release build
/// (<= 0.4 s on 2 cores); here what must hold is what made it possible: headers read once, and nothing else.
#[test]
fn a_checkpoint_of_371_474_tensors_opens_and_only_its_headers_are_read() {
    let folder = tempfile::tempdir().expect("a folder");
    checkpoints::write_many(folder.path(), 371_474, 11);
    let start = std::time::Instant::now();
    let c = Checkpoint::open(&[folder.path()]).expect("well formed");
    println!("opened in {:.3} s", start.elapsed().as_secs_f64());
    assert_eq!((c.len(), c.files().len(), c.nbytes()), (371_474, 11, 371_474 * 4));
    assert_eq!(c.warnings(), [] as [String; 0]);
    assert_eq!(c.header_read(), c.files().iter().map(|f| f.data_start).sum::<u64>());
    // Read by several threads, and yet each header belongs to its file.
    for (n, file) in c.files().iter().enumerate() {
        let shard = format!("model-{:05}-of-00011.safetensors", n + 1);
        assert!(file.spelled.as_path().ends_with(&shard), "{:?}", file.spelled);
        let first = n * 371_474 / 11;
        assert_eq!(file.tensors, first as u32..((n + 1) * 371_474 / 11) as u32);
        let expected = format!("model.layers.{}.mlp.experts.{}.", first / 1024, first / 4 % 256);
        assert!(c.tensor(file.tensors.start).name.starts_with(&expected), "{shard}");
    }
    let last = c.find("model.layers.362.mlp.experts.196.up_proj.weight").expect("the last tensor");
    assert_eq!((last.index, last.file), (371_473, 10));
}
