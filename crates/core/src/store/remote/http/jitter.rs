//! Random pauses, so that processes that were refused together do not come back together.

use std::time::Duration;

/// A source of random numbers (splitmix64). Each has a seed of its own.
#[derive(Debug)]
pub(in crate::store::remote) struct Jitter(u64);

impl Jitter {
    /// A seed of the kernel's: two processes that start at the same time have different ones.
    pub(in crate::store::remote) fn random() -> Jitter {
        let mut seed = [0; 8];
        // SAFETY: eight bytes, as the length says.
        let got = unsafe { libc::getrandom(seed.as_mut_ptr().cast(), seed.len(), libc::GRND_NONBLOCK) };
        let process = u64::from(std::process::id()) << 32;
        Jitter(if got == 8 { u64::from_le_bytes(seed) } else { process ^ (&raw const seed as u64) })
    }

    #[cfg(test)]
    pub(in crate::store::remote) fn seeded(seed: u64) -> Jitter {
        Jitter(seed)
    }

    /// From 0 to 1.
    pub(in crate::store::remote) fn share(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A time between these two.
    pub(in crate::store::remote) fn between(&mut self, least: Duration, most: Duration) -> Duration {
        least + most.saturating_sub(least).mul_f64(self.share())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_of_them_give_other_times_which_fill_the_whole_range() {
        let (least, most) = (Duration::from_secs(1), Duration::from_secs(3));
        let mut all = Vec::new();
        for mut jitter in [Jitter::random(), Jitter::random(), Jitter::seeded(1)] {
            all.extend((0..200).map(|_| jitter.between(least, most)));
        }
        assert!(all.iter().all(|time| (least..=most).contains(time)));
        for tenth in 0..10 {
            let from = least + (most - least) * tenth / 10;
            let there = all.iter().filter(|time| (from..from + (most - least) / 10).contains(time)).count();
            assert!((25..100).contains(&there), "{there} of 600 in tenth {tenth}");
        }
        let distinct: std::collections::HashSet<_> = all.iter().collect();
        assert!(distinct.len() > 590);
    }
}
