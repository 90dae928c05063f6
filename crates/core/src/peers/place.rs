//! Where a rank listens for the others: an address of this machine, and ports of a range.

use crate::error::{Error, ErrorKind, Result};
use crate::options::{Bind, Ports};
use std::collections::hash_map::RandomState;
use std::ffi::CStr;
use std::hash::{BuildHasher, Hasher};
use std::io::ErrorKind as Why;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::fd::AsRawFd;

/// Connections that the kernel keeps until they are accepted: those of all ranks may come at once.
const BACKLOG: i32 = 4096;

/// An address of this machine, and the ports there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListenAt {
    /// The address.
    pub at: IpAddr,
    /// `None`: any that is free.
    pub ports: Option<Ports>,
}

impl ListenAt {
    /// Any free port at this address.
    pub fn anywhere(at: IpAddr) -> ListenAt {
        ListenAt { at, ports: None }
    }

    /// Listens at a port that nobody else has, for many at once, and without waiting for any. Ranks that look at once find different ones: they begin at different ports, and
    /// the kernel gives each to one of them.
    ///
    /// # Errors
    /// `Limit`: every port of the range is taken. `Invalid`: this machine has no such address. Otherwise what the kernel says.
    pub(super) fn listen(&self) -> Result<TcpListener> {
        let listener = self.listener()?;
        listener.set_nonblocking(true).map_err(|e| refused(self.at, &e))?;
        // SAFETY: a plain system call on our own socket. It makes the queue longer, as far as the system allows.
        unsafe { libc::listen(listener.as_raw_fd(), BACKLOG) };
        Ok(listener)
    }

    fn listener(&self) -> Result<TcpListener> {
        let ListenAt { at, ports } = *self;
        let Some(range) = ports else { return TcpListener::bind((at, 0)).map_err(|e| refused(at, &e)) };
        let begin = RandomState::new().build_hasher().finish() as usize % range.count();
        for port in range.from(begin) {
            // With SO_REUSEADDR, which std sets, a port in TIME_WAIT is free. Of two that bind it at once, the kernel refuses one
            // in listen(2).
            match TcpListener::bind((at, port)) {
                Ok(listener) => return Ok(listener),
                Err(e) if e.kind() == Why::AddrInUse => {}
                Err(e) if e.kind() == Why::PermissionDenied => {
                    let text = format!("ports={range}: this process may not listen at port {port}: {e}");
                    return Err(Error::permission(text));
                }
                Err(e) => return Err(refused(at, &e)),
            }
        }
        let text = format!(
            "ports={range}: all {} ports of this range are taken at {at}: end what holds them, or give more; each rank of this \
             machine takes two in a load, and two more in a stream and within `joined`",
            range.count()
        );
        Err(Error::new(ErrorKind::Limit, text))
    }
}

/// The address at which it listens.
pub(super) fn address_of(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().map_err(|e| Error::io("ask for the address of a socket", &e))
}

fn refused(at: IpAddr, why: &std::io::Error) -> Error {
    if why.kind() == Why::AddrNotAvailable {
        return Error::invalid(format!("bind={at}: this machine does not have this address; {}", has()));
    }
    Error::io(&format!("listen at {at} for other ranks"), why)
}

/// The address that is meant, if one is.
///
/// # Errors
/// `Invalid`: there is no such interface, or it has no address that other machines can reach it at.
pub fn bound(bind: &Bind) -> Result<Option<IpAddr>> {
    match bind {
        Bind::Chosen => Ok(None),
        Bind::Address(address) => Ok(Some(*address)),
        Bind::Interface(name) => {
            let found = addresses()?;
            let best = found.iter().filter(|(of, _)| of == name).min_by_key(|(_, address)| address.is_ipv6());
            let none =
                || Error::invalid(format!("{name:?} is no interface of this machine with an address; {}", has()));
            best.map(|(_, address)| Some(*address)).ok_or_else(none)
        }
    }
}

/// The addresses of this machine, for an error.
fn has() -> String {
    let found = addresses().unwrap_or_default();
    let listed: Vec<String> = found.iter().map(|(name, address)| format!("{name} ({address})")).collect();
    format!("it has {}", if listed.is_empty() { "none".into() } else { listed.join(", ") })
}

/// The interfaces of this machine that are up, and their addresses without the link-local ones.
fn addresses() -> Result<Vec<(String, IpAddr)>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: it writes the pointer, and the result is checked.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(Error::io("list the interfaces of this machine", &std::io::Error::last_os_error()));
    }
    let (mut found, mut next) = (Vec::new(), first);
    // SAFETY: a list that the call has made: each entry has a name, and an address of the family that it says, or none.
    while let Some(one) = unsafe { next.as_ref() } {
        next = one.ifa_next;
        if one.ifa_addr.is_null() || one.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: as above.
        let (name, address) = unsafe {
            let name = CStr::from_ptr(one.ifa_name).to_string_lossy().into_owned();
            let address = match i32::from((*one.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let v4 = &*one.ifa_addr.cast::<libc::sockaddr_in>();
                    Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))))
                }
                libc::AF_INET6 => {
                    let v6 = &*one.ifa_addr.cast::<libc::sockaddr_in6>();
                    Some(IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr)))
                }
                _ => None,
            };
            (name, address)
        };
        let is_local = |v6: Ipv6Addr| v6.segments()[0] & 0xffc0 == 0xfe80;
        found.extend(address.filter(|a| !matches!(a, IpAddr::V6(v6) if is_local(*v6))).map(|address| (name, address)));
    }
    // SAFETY: the list, once.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    /// A range of free ports, below those that the kernel gives out.
    fn range(count: u16) -> Ports {
        let begin = 2000 + (RandomState::new().build_hasher().finish() % 20_000) as u16;
        (begin..30_000)
            .step_by(usize::from(count))
            .find(|first| (*first..first + count).all(|port| TcpListener::bind((HERE, port)).is_ok()))
            .map(|first| Ports::parse(&format!("{first}-{}", first + count - 1)).unwrap())
            .unwrap()
    }

    #[test]
    fn those_that_look_at_once_get_different_ports_and_no_more_than_there_are() {
        let place = ListenAt { at: HERE, ports: Some(range(24)) };
        let found: Vec<Result<TcpListener>> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..32).map(|_| scope.spawn(|| place.listen())).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let ports: HashSet<u16> = found.iter().flatten().map(|one| one.local_addr().unwrap().port()).collect();
        assert_eq!((ports.len(), found.iter().flatten().count()), (24, 24));
        let error = found.iter().find_map(|one| one.as_ref().err()).unwrap();
        assert_eq!(error.kind(), ErrorKind::Limit);
        assert!(error.to_string().contains(&format!("ports={}", place.ports.unwrap())), "{error}");
    }

    #[test]
    fn a_port_that_another_program_has_is_left_to_it_and_one_that_was_left_is_taken() {
        let ports = range(2);
        let place = ListenAt { at: HERE, ports: Some(ports) };
        // At all addresses
        let other = TcpListener::bind((Ipv4Addr::UNSPECIFIED, ports.from(0).next().unwrap())).unwrap();
        let mine = place.listen().unwrap();
        assert_ne!(mine.local_addr().unwrap().port(), other.local_addr().unwrap().port());
        // A connection of the port outlives its listener
        let _calls = std::net::TcpStream::connect(mine.local_addr().unwrap()).unwrap();
        mine.set_nonblocking(false).unwrap();
        let _called = mine.accept().unwrap();
        assert_eq!(place.listen().unwrap_err().kind(), ErrorKind::Limit);
        let port = mine.local_addr().unwrap().port();
        drop(mine);
        assert_eq!(place.listen().unwrap().local_addr().unwrap().port(), port);
    }

    #[test]
    fn an_interface_stands_for_its_address_and_another_is_refused_with_those_there_are() {
        assert_eq!(bound(&Bind::Chosen).unwrap(), None);
        assert_eq!(bound(&Bind::Interface("lo".into())).unwrap(), Some(HERE));
        let error = bound(&Bind::Interface("none0".into())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("none0") && error.to_string().contains("lo (127.0.0.1)"), "{error}");
    }

    #[test]
    fn an_address_of_another_machine_is_refused() {
        // TEST-NET-1 (RFC 5737)
        let at = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
        let error = ListenAt { at, ports: Some(range(2)) }.listen().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().starts_with("bind=192.0.2.1: this machine does not have"), "{error}");
    }
}
