//! Random numbers that are the same in every run, and pipes.

/// SplitMix64 (Steele, Lea, Flood 2014), as in `engine/simulator/memory.rs`.
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }

    pub(super) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Between these two, as likely in each decade.
    pub(super) fn between(&mut self, least: f64, most: f64) -> f64 {
        let share = self.below(1 << 20) as f64 / (1 << 20) as f64;
        least * (most / least).powf(share)
    }
}

/// A link that carries one transfer at a time, at `rate` bytes per second.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pipe {
    pub(super) rate: f64,
    free_at: u64,
}

impl Pipe {
    pub(super) fn new(rate: f64) -> Pipe {
        Pipe { rate, free_at: 0 }
    }

    /// When a transfer that begins at `now` or later is over. Nanoseconds.
    pub(super) fn carry(&mut self, now: u64, bytes: u64) -> u64 {
        self.free_at = self.free_at.max(now) + (bytes as f64 / self.rate * 1e9) as u64;
        self.free_at
    }
}
