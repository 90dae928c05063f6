//! Whether the other ranks are there while no load of them is under way: between two loads, and before the first.
//!
//! Each rank answers ([`Pulse`]) and asks the others ([`Prober`]) on threads of its own, whatever its program does meanwhile.

use super::key::Pass;
use super::place::ListenAt;
use super::pulse::{Prober, Pulse, Reachable};
use crate::error::{Error, Result};
use crate::sync::{lock, Builder, JoinHandle, Mutex};
use crate::threads::{guarded, step};
use crate::wake::Wake;
use std::net::SocketAddr;
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
    pass: Pass,
    shared: Arc<LookoutShared>,
    thread: Option<JoinHandle<()>>,
    /// In a forked child it is the parent's: their eventfd is the same.
    process: u32,
}

#[derive(Debug)]
struct LookoutShared {
    over: Wake,
    lost: Mutex<Option<Error>>,
}

impl Lookout {
    /// Answers at a port of a place.
    ///
    /// # Errors
    /// `Limit`: the ports of the range are taken. `Invalid`: this machine has no such address. Otherwise what the kernel says.
    pub fn new(place: ListenAt, pass: Pass) -> Result<Lookout> {
        let shared = Arc::new(LookoutShared { over: Wake::new()?, lost: Mutex::new(None) });
        let pulse = Pulse::start(place, &pass)?;
        Ok(Lookout { pulse, pass, shared, thread: None, process: std::process::id() })
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
    pub fn watch(&mut self, pulses: &[Reachable], silence: Duration) -> Result<()> {
        let mut prober = Prober::new(pulses, &self.pass, silence, Some(FOR_EACH * pulses.len() as u32));
        let others: Vec<u32> = (0..pulses.len() as u32).filter(|other| *other != self.pass.rank).collect();
        let shared = self.shared.clone();
        let thread = Builder::new().name("penstock-lookout".to_owned());
        let thread = thread.spawn(move || {
            let looked = guarded("penstock-lookout", || {
                while !shared.over.wait(LOOK) {
                    step("penstock-lookout");
                    prober.look(&others)?;
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
        if self.process != std::process::id() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.shared.over.notify();
        if let Some(thread) = self.thread.take() {
            let _it_was_told = thread.join();
        }
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr, TcpListener};
    use std::time::Instant;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const SILENCE: Duration = Duration::from_millis(800);

    #[test]
    fn a_rank_that_was_stopped_is_told_from_ones_that_answer_and_ones_that_have_ended() {
        let lookout =
            |rank| Lookout::new(ListenAt::anywhere(HERE), Pass { rank, token: [rank as u8; 16], key: None }).unwrap();
        let ranks_at = |addresses: &[SocketAddr]| {
            (0..).zip(addresses).map(|(rank, address)| (*address, [rank; 16])).collect::<Vec<Reachable>>()
        };
        let mut here = lookout(0);
        let there = lookout(1);
        let ended = lookout(2).address();
        // The kernel connects, as for a process that was stopped.
        let stopped = TcpListener::bind((HERE, 0)).unwrap();
        let pulses = [here.address(), there.address(), ended];
        here.watch(&ranks_at(&pulses), SILENCE).unwrap();
        std::thread::sleep(SILENCE * 2);
        assert!(here.lost().is_none());
        let mut another = lookout(0);
        let pulses = [another.address(), there.address(), ended, stopped.local_addr().unwrap()];
        let begun = Instant::now();
        another.watch(&ranks_at(&pulses), SILENCE).unwrap();
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
