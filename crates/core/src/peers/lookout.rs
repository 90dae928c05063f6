//! Whether the other ranks are there while no load of them is under way: between two loads, and before the first.
//!
//! Each rank answers ([`Pulse`]) and asks the others ([`Pulses`]) on threads of its own, whatever its program does meanwhile.

use super::pulse::{Pulse, Pulses};
use crate::error::{Error, Result};
use crate::sync::{lock, Builder, JoinHandle, Mutex};
use crate::threads::{guarded, step};
use crate::wake::Wake;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// Milliseconds from one look to the next.
const LOOK: i32 = 50;
/// From one question to a rank to the next, for each rank there is: a thousand ranks are asked every 8 s.
const FOR_EACH: Duration = Duration::from_millis(8);

/// A rank that answers, and watches the others.
#[derive(Debug)]
pub struct Lookout {
    pulse: Pulse,
    shared: Arc<OnLookout>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct OnLookout {
    over: Wake,
    lost: Mutex<Option<Error>>,
}

impl Lookout {
    /// Answers at a port of its own at this address.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn new(at: IpAddr) -> Result<Lookout> {
        let shared = Arc::new(OnLookout { over: Wake::new()?, lost: Mutex::new(None) });
        Ok(Lookout { pulse: Pulse::start(at)?, shared, thread: None })
    }

    /// The address at which it answers.
    pub fn address(&self) -> SocketAddr {
        self.pulse.address()
    }

    /// Watches the other ranks from now on: `pulses` are those of all. One that is asked and does not answer
    /// for `silence` was stopped. One that refuses has ended or needs nobody any more, which is for others to judge.
    ///
    /// # Errors
    /// There can be no more threads.
    pub fn watch(&mut self, rank: u32, pulses: &[SocketAddr], silence: Duration) -> Result<()> {
        let mut asked = Pulses::forgiving(pulses, silence, FOR_EACH * pulses.len() as u32);
        let others: Vec<u32> = (0..pulses.len() as u32).filter(|other| *other != rank).collect();
        let shared = self.shared.clone();
        let thread = Builder::new().name("penstock-lookout".to_owned());
        let thread = thread.spawn(move || {
            let looked = guarded("penstock-lookout", || {
                while !shared.over.wait(LOOK) {
                    step("penstock-lookout");
                    asked.look(&others)?;
                }
                Ok(())
            });
            *lock(&shared.lost) = looked.and_then(|looked| looked).err();
        });
        self.thread = Some(thread.map_err(|e| Error::io("start a thread", &e))?);
        Ok(())
    }

    /// The error for a rank that was stopped, as soon as there is one.
    pub fn lost(&self) -> Option<Error> {
        lock(&self.shared.lost).clone().or_else(|| self.pulse.check().err())
    }
}

impl Drop for Lookout {
    fn drop(&mut self) {
        self.shared.over.notify();
        if let Some(thread) = self.thread.take() {
            let _it_was_told = thread.join();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};
    use std::time::Instant;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const SILENCE: Duration = Duration::from_millis(800);

    #[test]
    fn a_rank_that_was_stopped_is_told_from_ones_that_answer_and_ones_that_have_ended() {
        let mut here = Lookout::new(HERE).unwrap();
        let there = Lookout::new(HERE).unwrap();
        let ended = Lookout::new(HERE).unwrap().address();
        // The kernel connects, as for a process that was stopped.
        let stopped = TcpListener::bind((HERE, 0)).unwrap();
        let pulses = [here.address(), there.address(), ended];
        here.watch(0, &pulses, SILENCE).unwrap();
        std::thread::sleep(SILENCE * 2);
        assert!(here.lost().is_none());
        let mut another = Lookout::new(HERE).unwrap();
        let pulses = [another.address(), there.address(), ended, stopped.local_addr().unwrap()];
        let begun = Instant::now();
        another.watch(0, &pulses, SILENCE).unwrap();
        let error = loop {
            match another.lost() {
                Some(error) => break error,
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        assert_eq!(error.peer().map(|peer| peer.0), Some(3), "{error}");
        assert!(begun.elapsed() >= SILENCE);
    }
}
