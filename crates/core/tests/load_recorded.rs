//! Loads with a layout that was made elsewhere.
#![allow(clippy::unwrap_used)]

mod checkpoints;

use penstock::format::Checkpoint;
use penstock::load::{Load, Next};
use penstock::options::{Options, Order};
use penstock::plan::layout::{BlockKind, BlockSpec, Layout, Place, Target};
use penstock::plan::request::{Memory, Request, Where};
use penstock::plan::want::Want;
use penstock::ErrorKind;
use std::sync::Arc;

const SIZES: [(&str, u64); 4] = [("a", 10_000), ("b", 3), ("c", 300_000), ("d", 4096)];

fn request(checkpoint: &Arc<Checkpoint>, layout: &Layout, copy: Option<bool>) -> Request {
    Request {
        checkpoint: checkpoint.clone(),
        wants: Want::all(checkpoint),
        layout: Some(Arc::new(layout.clone())),
        device: Where::Cpu,
        memory: Memory::Ours,
        options: Options { copy, misaligned: copy.is_none(), ..Options::default() },
        stream: true,
    }
}

#[test]
fn a_load_hands_out_what_the_layout_says_in_its_order() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("model.safetensors");
    checkpoints::write(&path, &SIZES);
    let bytes = std::fs::read(&path).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&[path]).unwrap());
    let wants = Want::all(&checkpoint);
    // Mapped, or private memory, in place and in another order; and each in a block of its own.
    let mut mirrored = Layout::new(&checkpoint, &wants, &Target::Cpu { misaligned: true }, Order::File).unwrap();
    mirrored.order.reverse();
    let mut apart = mirrored.clone();
    apart.blocks = SIZES.map(|(_, n)| BlockSpec { kind: BlockKind::Dense, nbytes: n + 128 }).to_vec();
    apart.places = (0..).zip(SIZES).map(|(block, (_, nbytes))| Place { block, offset: 64, nbytes }).collect();
    for (layout, copy) in [(&mirrored, None), (&apart, None), (&apart, Some(true))] {
        let load = Load::start(request(&checkpoint, layout, copy)).unwrap();
        let mut order = Vec::new();
        loop {
            match load.next(None).unwrap() {
                Next::Ready(want) => {
                    let view = load.view(want).unwrap();
                    let tensor = checkpoint.tensor(want);
                    // SAFETY: the view has so many bytes, and nobody writes to them.
                    let there =
                        unsafe { std::slice::from_raw_parts(view.address() as *const u8, view.nbytes() as usize) };
                    assert!(there == &bytes[tensor.begin as usize..tensor.end as usize], "{want}");
                    load.take(want).unwrap();
                    order.push(want);
                }
                Next::End => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(order, [3, 2, 1, 0]);
        assert_eq!(load.layout(), layout);
    }
    apart.places[2].nbytes += 1;
    let error = Load::start(request(&checkpoint, &apart, None)).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}
