//! Real connections: sockets and epoll.

use super::address::Server;
use super::common::Common;
use super::connection::Connection;
use super::racing::Attempt;
use super::wires::{Watched, Wires};
use crate::error::{Error, Result};
use crate::source::epoll;
use crate::wake::Wake;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The number of the wake in epoll's set.
const WAKE: u64 = u64::MAX;
/// Events that are asked for at once.
const EVENTS: usize = 256;

/// Sockets, and who is notified of them.
pub(in crate::store::remote) struct Sockets {
    common: Arc<Common>,
    epoll: OwnedFd,
    /// Notified when there is something new to do. Without one, name servers are waited for.
    wake: Option<Arc<Wake>>,
    /// Connections that were made; each goes to the next address of its server.
    made: usize,
}

impl Sockets {
    pub(in crate::store::remote) fn new(common: Arc<Common>, wake: Option<Arc<Wake>>) -> Result<Sockets> {
        let epoll = epoll()?;
        if let Some(wake) = &wake {
            control(&epoll, libc::EPOLL_CTL_ADD, wake.fd(), libc::EPOLLIN as u32, WAKE)?;
        }
        Ok(Sockets { common, epoll, wake, made: 0 })
    }
}

impl Wires for Sockets {
    type Stream = Connection;

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wake(&self) -> Option<&Arc<Wake>> {
        self.wake.as_ref()
    }

    fn connect(&mut self, server: &Server) -> Result<Option<Connection>> {
        let proxy = self.common.proxy(server)?;
        let to = proxy.map_or(server, |proxy| &proxy.server);
        let Some(addresses) = self.common.names.addresses(to, self.wake.as_ref()) else { return Ok(None) };
        let no_proxy = |e: Error| match proxy {
            Some(proxy) => e.reworded(|why| format!("the proxy {}: {why}", proxy.name())),
            None => e,
        };
        let addresses = addresses.map_err(no_proxy)?;
        let tls = if server.tls { Some(self.common.tls.for_host(&self.common.settings, &server.host)?) } else { None };
        let interfaces = &self.common.settings.interfaces;
        let health = &self.common.names.health;
        // Some addresses cannot be reached from here, such as those of IPv6 on many machines. That is known at once.
        let mut tries = 0;
        loop {
            let hopeful = health.hopeful(&addresses);
            let (made, each) = (self.made, interfaces.len().max(1));
            (self.made, tries) = (made + 1, tries + 1);
            let interface = interfaces.get(made % each).map(String::as_str);
            // Each interface comes to each address.
            let to = hopeful[made / each % hopeful.len()];
            let begun = self.now();
            match Connection::connect(to, interface, proxy.map(|proxy| proxy.via(server)), tls.clone()) {
                Ok(connection) if addresses.len() > 1 => {
                    let (health, of) = (health.clone(), addresses.clone());
                    return Ok(Some(connection.attempting(Attempt { health, of, to: *to, begun })));
                }
                Ok(connection) => return Ok(Some(connection)),
                Err(e) if tries < addresses.len() * each => health.failed(to, &e),
                Err(e) => {
                    let over = interface.map_or_else(String::new, |name| format!(" over the interface {name}"));
                    return Err(Error::io(&format!("connect{over}"), &e));
                }
            }
        }
    }

    fn watch(&mut self, stream: &Connection, number: usize, before: Watched, wanted: Watched) -> Result<()> {
        let how = match (before, wanted) {
            (before, wanted) if before == wanted => return Ok(()),
            (Watched::Nothing, _) => libc::EPOLL_CTL_ADD,
            (_, Watched::Nothing) => libc::EPOLL_CTL_DEL,
            _ => libc::EPOLL_CTL_MOD,
        };
        let events = match wanted {
            Watched::Nothing => 0,
            Watched::Bytes => libc::EPOLLIN,
            Watched::Both => libc::EPOLLIN | libc::EPOLLOUT,
        };
        control(&self.epoll, how, stream.fd(), events as u32, number as u64)
    }

    fn wait(&mut self, most: Option<Duration>, numbers: &mut Vec<usize>) -> Result<bool> {
        let timeout = most.map_or(-1, |most| most.as_micros().div_ceil(1000).min(60_000) as i32);
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        // SAFETY: `events` has room for as many as are asked for.
        let found = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), EVENTS as i32, timeout) };
        if found < 0 {
            return match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => Ok(false),
                e => Err(Error::io("wait for servers", &e)),
            };
        }
        for event in &events[..found as usize] {
            match event.u64 {
                WAKE => self.wake.iter().for_each(|wake| wake.clear()),
                number => numbers.push(number as usize),
            }
        }
        Ok((found as usize) < EVENTS)
    }
}

fn control(epoll: &OwnedFd, how: i32, fd: RawFd, events: u32, number: u64) -> Result<()> {
    let mut event = libc::epoll_event { events, u64: number };
    // SAFETY: one event is read.
    match unsafe { libc::epoll_ctl(epoll.as_raw_fd(), how, fd, &raw mut event) } {
        0 => Ok(()),
        _ => Err(Error::io("watch a connection", &io::Error::last_os_error())),
    }
}
