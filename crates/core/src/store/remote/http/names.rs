//! The addresses of servers. `getaddrinfo` blocks, so threads that may not are answered later.

use super::address::Server;
use super::racing::{in_turn, Health};
use crate::error::{Error, ErrorKind, Result};
use crate::machine::block_signals;
use crate::sync::{lock, Mutex};
use crate::threads::guarded;
use crate::wake::Wake;
use std::collections::HashMap;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long an answer is used. Object stores answer each time with other addresses.
const FRESH: Duration = Duration::from_secs(30);

type Resolved = Result<Arc<Vec<SocketAddr>>>;

/// Known addresses of servers, and the callers that wait for more.
#[derive(Debug, Default)]
pub(in crate::store::remote) struct Names {
    lookups: Mutex<Lookups>,
    /// The health of addresses.
    pub(in crate::store::remote) health: Arc<Health>,
}

#[derive(Debug, Default)]
struct Lookups {
    known: HashMap<Server, (Instant, Resolved)>,
    /// Servers that are being asked about, and who is notified.
    asked: HashMap<Server, Vec<Arc<Wake>>>,
}

impl Names {
    /// The addresses of a server, if they are known. If they are not, it is asked for them, and `wake` is notified when the
    /// answer is there. Without a `wake` the call waits for it.
    pub(in crate::store::remote) fn addresses(
        self: &Arc<Self>,
        server: &Server,
        wake: Option<&Arc<Wake>>,
    ) -> Option<Resolved> {
        if let Some(ip) = server.ip() {
            return Some(Ok(Arc::new(vec![SocketAddr::new(ip, server.port)])));
        }
        let mut state = lock(&self.lookups);
        match state.known.get(server) {
            // An error is news once.
            Some((_, Err(_))) => return state.known.remove(server).map(|(_, error)| error),
            Some((when, found)) if when.elapsed() <= FRESH => return Some(found.clone()),
            _ => {}
        }
        let Some(wake) = wake else {
            drop(state);
            let found = resolved(server);
            if found.is_ok() {
                lock(&self.lookups).known.insert(server.clone(), (Instant::now(), found.clone()));
            }
            return Some(found);
        };
        if let Some(waiting) = state.asked.get_mut(server) {
            if !waiting.iter().any(|other| Arc::ptr_eq(other, wake)) {
                waiting.push(wake.clone());
            }
            return None;
        }
        state.asked.insert(server.clone(), vec![wake.clone()]);
        drop(state);
        let (names, asked) = (self.clone(), server.clone());
        let thread = std::thread::Builder::new().name("penstock-dns".into()).stack_size(256 << 10);
        match thread.spawn(move || names.answer(&asked)) {
            Ok(_) => None,
            Err(e) => {
                lock(&self.lookups).asked.remove(server);
                Some(Err(Error::io("start a thread", &e)))
            }
        }
    }

    /// On a thread of its own, which nobody waits for: a name server that is gone takes its time.
    fn answer(&self, server: &Server) {
        block_signals();
        let found = guarded("penstock-dns", || resolved(server)).and_then(|found| found);
        let mut state = lock(&self.lookups);
        state.known.insert(server.clone(), (Instant::now(), found));
        for wake in state.asked.remove(server).unwrap_or_default() {
            wake.notify();
        }
    }
}

fn resolved(server: &Server) -> Resolved {
    let found = (server.host.as_str(), server.port).to_socket_addrs();
    let found: Vec<_> = found.map_err(|e| no_address(server).caused_by(e))?.collect();
    if found.is_empty() {
        return Err(no_address(server));
    }
    Ok(Arc::new(in_turn(found)))
}

fn no_address(server: &Server) -> Error {
    let text = format!("the name server knows no address of the host {}: is it spelled right?", server.host);
    Error::new(ErrorKind::Io, text)
}
