//! Connections that stand between loads: a process that ends closes its own.

use super::handshake::Purpose;
use super::key::Pass;
use super::meet::Meeting;
use super::place::{address_of, ListenAt};
use super::pulse::{Prober, Reachable};
use crate::error::Result;
use crate::source::wait_readable;
use std::io::{ErrorKind as Why, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Connections to all other ranks. All that is said on them, before they are closed, is for which rank this one has given up.
#[derive(Debug)]
pub struct StandingLinks {
    listener: Option<TcpListener>,
    address: SocketAddr,
    pass: Pass,
    /// By rank; `None`: this one, or one that has closed.
    of: Vec<Option<TcpStream>>,
    /// Ranks that have closed, and for which rank each of them has given up.
    closed: Vec<(u32, Option<u32>)>,
}

impl StandingLinks {
    /// Listens at a port of a place.
    ///
    /// # Errors
    /// `Limit`: the ports of the range are taken. `Invalid`: this machine has no such address. Otherwise what the kernel says.
    pub fn new(place: ListenAt, pass: Pass) -> Result<StandingLinks> {
        let listener = place.listen()?;
        let address = address_of(&listener)?;
        Ok(StandingLinks { listener: Some(listener), address, pass, of: Vec::new(), closed: Vec::new() })
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.pass.rank
    }

    /// The address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to all others, and listens no more. `pulses`: what says of each rank whether it is there. `token` names those that
    /// belong together. A rank that does not answer for `silence` is given up. `go_on` is asked every 50 ms.
    ///
    /// # Errors
    /// `Peer` if a rank did not come within `patience`, is not there any more, cannot be reached, or has another key.
    /// `Cancelled` if `go_on` says no.
    pub fn join(
        &mut self,
        addresses: &[SocketAddr],
        pulses: &[Reachable],
        token: [u8; 16],
        (patience, silence): (Duration, Duration),
        go_on: impl FnMut() -> bool,
    ) -> Result<()> {
        let Some(listener) = self.listener.take() else { return Ok(()) };
        let mut prober = Prober::new(pulses, &self.pass, silence, None);
        let me = Pass { token, ..self.pass.clone() };
        let addresses: Vec<Option<SocketAddr>> = addresses.iter().copied().map(Some).collect();
        let (listener, kinds, addresses) = (&listener, &[Purpose::Standing], &addresses[..]);
        let meeting = Meeting { listener, me: &me, kinds, addresses, patience, silence };
        let found = meeting.connect(go_on, |awaited| prober.are_there(awaited))?;
        self.of = found.into_iter().map(|streams| streams.into_iter().next()).collect();
        Ok(())
    }

    /// Ranks that have closed their connection, and for which rank each of them has given up (`None`: it has not said so).
    pub fn closed(&mut self) -> &[(u32, Option<u32>)] {
        let fds = self.of.iter().map(|one| one.as_ref().map_or(-1, AsRawFd::as_raw_fd));
        let readable = wait_readable(fds, Some(Duration::ZERO));
        for (rank, _) in (0..).zip(readable).filter(|(_, readable)| *readable) {
            let Some(stream) = self.of[rank as usize].take() else { continue };
            let mut word = [0; 4];
            match (&stream).read(&mut word) {
                Err(e) if matches!(e.kind(), Why::WouldBlock | Why::Interrupted) => {
                    self.of[rank as usize] = Some(stream)
                }
                said => self.closed.push((rank, matches!(said, Ok(4)).then_some(u32::from_le_bytes(word)))),
            }
        }
        &self.closed
    }

    /// Closes them. `blamed`: the rank for which this one gives up.
    pub fn close(&mut self, blamed: Option<u32>) {
        for stream in self.of.drain(..).flatten() {
            if let Some(blamed) = blamed {
                // Four bytes always fit.
                let _it_may_be_gone = (&stream).write(&blamed.to_le_bytes());
            }
        }
        self.listener = None;
    }
}
