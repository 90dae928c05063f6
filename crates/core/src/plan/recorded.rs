//! A layout that was made elsewhere, as by another rank: whether a load here can obey it.

use super::layout::{BlockKind, Layout, Target};
use super::want::{Runs, Want};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Checkpoint;
use crate::options::{CPU_ALIGN, GPU_ALIGN, PAGE};

/// The layout as a load of these wants takes it. It leaves out the caller's memory: each load has its own.
///
/// # Errors
/// `Invalid` if it is not a layout of these wants of this checkpoint, or not one for this target. One that
/// [`Layout::new`] makes of them, in any order, is never refused.
pub(crate) fn recorded(given: &Layout, checkpoint: &Checkpoint, wants: &[Want], target: &Target) -> Result<Layout> {
    let mut layout = given.clone();
    layout.strides.clear();
    match misfit(&mut layout, checkpoint, wants, target)? {
        None => Ok(layout),
        Some(why) => Err(Error::new(ErrorKind::Invalid, format!("the given layout does not fit this load: {why}"))),
    }
}

fn misfit(
    layout: &mut Layout,
    checkpoint: &Checkpoint,
    wants: &[Want],
    target: &Target,
) -> Result<Option<&'static str>> {
    let count = wants.len();
    let Layout { blocks, places, runs, files, order, .. } = &mut *layout;
    if [places.len(), runs.len(), files.len(), order.len()] != [count; 4] {
        return Ok(Some("it has another number of wants"));
    }
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if !sorted.iter().copied().eq(0..count as u32) {
        return Ok(Some("its order does not name every want once"));
    }
    let mut wants_of_block = vec![0u32; blocks.len()];
    for (number, (want, place)) in wants.iter().zip(&*places).enumerate() {
        let own = Runs::of(checkpoint, want)?;
        let info = checkpoint.tensor(want.tensor);
        if runs[number] != own || files[number] != info.file {
            return Ok(Some("a want has other bytes"));
        }
        let Some(block) = blocks.get_mut(place.block as usize) else {
            return Ok(Some("a want lies in a block that is not there"));
        };
        wants_of_block[place.block as usize] += 1;
        let fits = match (target, block.kind) {
            (Target::Foreign, BlockKind::Foreign { want }) => {
                // The caller's memory says how long it is.
                block.nbytes = place.nbytes;
                place.offset == 0 && want as usize == number && place.block == want
            }
            (Target::Gpu, BlockKind::Dense) => place.offset % GPU_ALIGN == 0,
            (Target::Cpu { .. }, BlockKind::Dense) => place.offset % CPU_ALIGN == 0,
            (Target::Cpu { misaligned }, BlockKind::Mirror { file, start }) => {
                let aligned = *misaligned || own.start % info.dtype.align() == 0;
                let there = own.axes.is_empty()
                    && own.len > 0
                    && file == info.file
                    && own.start.checked_sub(start) == Some(place.offset);
                aligned && there
            }
            _ => false,
        };
        if !fits {
            return Ok(Some("a want lies in a block of another kind, or not where such a block has it"));
        }
        if place.nbytes != own.nbytes() || place.offset.checked_add(place.nbytes).is_none_or(|end| end > block.nbytes) {
            return Ok(Some("a want has another size than its place, or ends behind its block"));
        }
    }
    if wants_of_block.contains(&0) {
        return Ok(Some("a block has no want"));
    }
    let mut taken: Vec<(u32, u64, u64)> =
        places.iter().filter(|p| p.nbytes > 0).map(|p| (p.block, p.offset, p.offset + p.nbytes)).collect();
    taken.sort_unstable();
    if taken.windows(2).any(|pair| pair[0].0 == pair[1].0 && pair[0].2 > pair[1].1) {
        return Ok(Some("two wants share bytes of a block"));
    }
    let mut mirrors: Vec<(u32, u64, u64)> = Vec::new();
    for block in &*blocks {
        if let BlockKind::Mirror { file, start } = block.kind {
            let size = checkpoint.files()[file as usize].size.next_multiple_of(PAGE);
            match start.checked_add(block.nbytes).filter(|end| *end <= size) {
                Some(end) if start % PAGE == 0 && end % PAGE == 0 => mirrors.push((file, start, end)),
                _ => return Ok(Some("a block is no whole pages of its file")),
            }
        }
    }
    mirrors.sort_unstable();
    if mirrors.windows(2).any(|pair| pair[0].0 == pair[1].0 && pair[0].2 > pair[1].1) {
        return Ok(Some("two blocks have the same page of a file"));
    }
    layout.check_size()?;
    Ok(None)
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::options::Order;
    use crate::plan::layout::{BlockSpec, Place};
    use crate::plan::want::AxisSlice;

    /// Two tensors with a hole of a page between them, in the page of the first one a small third one.
    fn checkpoint() -> Checkpoint {
        let entries = [("a", "U8", 8192, 0), ("b", "F32", 16, 8192), ("c", "U8", 40_000, 8208)];
        let entries = entries.map(|(name, dtype, nbytes, at)| {
            let count = if dtype == "F32" { nbytes / 4 } else { nbytes };
            format!(r#""{name}":{{"dtype":"{dtype}","shape":[{count}],"data_offsets":[{at},{}]}}"#, at + nbytes)
        });
        let json = format!("{{{}}}", entries.join(","));
        let json = format!("{json}{}", " ".repeat(4096 - 8 - json.len()));
        let bytes = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
        Checkpoint::from_bytes(&bytes, 4096 + 48_208).unwrap()
    }

    const TARGETS: [Target; 4] =
        [Target::Cpu { misaligned: true }, Target::Cpu { misaligned: false }, Target::Gpu, Target::Foreign];

    #[test]
    fn what_this_crate_makes_is_accepted_in_any_order_and_nothing_else_of_another_load() {
        let checkpoint = checkpoint();
        let whole = Want::all(&checkpoint);
        let part = vec![Want::part(2, [AxisSlice::from(10..20)]), Want::whole(0), Want::whole(0)];
        for target in &TARGETS {
            for wants in [&whole, &part] {
                for order in [Order::File, Order::Layer] {
                    let mut own = Layout::new(&checkpoint, wants, target, order).unwrap();
                    assert_eq!(recorded(&own, &checkpoint, wants, target).unwrap(), own);
                    own.order.reverse();
                    assert_eq!(recorded(&own, &checkpoint, wants, target).unwrap(), own);
                }
            }
            let other = Layout::new(&checkpoint, &part, target, Order::File).unwrap();
            assert!(recorded(&other, &checkpoint, &whole, target).is_err());
            assert!(recorded(&other, &checkpoint, &part[..2], target).is_err());
            assert!(recorded(&Layout::default(), &checkpoint, &part, target).is_err());
        }
    }

    #[test]
    fn what_a_load_could_not_obey_is_refused() {
        let checkpoint = checkpoint();
        let wants = Want::all(&checkpoint);
        let refused = |target: &Target, change: &dyn Fn(&mut Layout), why: &str| {
            let mut layout = Layout::new(&checkpoint, &wants, target, Order::File).unwrap();
            change(&mut layout);
            let error = recorded(&layout, &checkpoint, &wants, target).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains(why), "{error}, not {why}");
        };
        for target in &TARGETS {
            refused(target, &|l| l.places.truncate(2), "number of wants");
            refused(target, &|l| l.order[0] = 1, "order");
            refused(target, &|l| l.runs[1].start += 4, "other bytes");
            refused(target, &|l| l.files[1] = 7, "other bytes");
            refused(target, &|l| l.places[1].block = 9, "not there");
            refused(target, &|l| l.places[1].nbytes -= 1, "another size");
            refused(target, &|l| l.places[1].offset = u64::MAX, "");
            refused(target, &|l| l.blocks.push(l.blocks[0]), "no want");
        }
        let (cpu, gpu, foreign) = (&TARGETS[0], &TARGETS[2], &TARGETS[3]);
        refused(foreign, &|l| l.places.swap(0, 1), "another kind");
        refused(gpu, &|l| l.places[1].offset += 64, "another kind");
        refused(gpu, &|l| l.blocks.iter_mut().for_each(|b| b.nbytes -= 1), "behind its block");
        refused(gpu, &|l| l.places[1].offset = 0, "share bytes");
        refused(gpu, &|l| l.blocks[0].kind = BlockKind::Foreign { want: 0 }, "another kind");
        refused(cpu, &|l| l.blocks[0].kind = BlockKind::Mirror { file: 0, start: 0 }, "not where");
        refused(cpu, &|l| l.blocks[0].nbytes += PAGE, "no whole pages");
        refused(cpu, &|l| l.blocks[0].nbytes += 1, "no whole pages");
        let twice = |l: &mut Layout| {
            l.blocks.push(l.blocks[0]);
            l.places[1].block = 1;
        };
        refused(cpu, &twice, "the same page");
        let far = |l: &mut Layout| l.blocks = vec![BlockSpec { nbytes: u64::MAX, ..l.blocks[0] }];
        refused(cpu, &far, "no whole pages");
    }

    #[test]
    fn wants_may_lie_in_other_blocks_than_this_crate_would_make() {
        let checkpoint = checkpoint();
        let wants = Want::all(&checkpoint);
        let mut layout = Layout::new(&checkpoint, &wants, &Target::Gpu, Order::File).unwrap();
        layout.blocks =
            layout.places.iter().map(|p| BlockSpec { kind: BlockKind::Dense, nbytes: p.nbytes + 256 }).collect();
        layout.places = (0..).zip(&layout.places).map(|(block, p)| Place { block, offset: 256, ..*p }).collect();
        assert_eq!(recorded(&layout, &checkpoint, &wants, &Target::Gpu).unwrap(), layout);
        assert!(recorded(&layout, &checkpoint, &wants, &Target::Foreign).is_err());
    }
}
