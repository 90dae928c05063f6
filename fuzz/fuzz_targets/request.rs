#![no_main]
//! Any bytes as requests to `penstock serve`: no panic, no name that leads out, and answers that fit their ranges.

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (u64, u64, &[u8])| {
    let (size, there, requests) = input;
    penstock_serve::fuzzing::check(requests, size, there);
});
