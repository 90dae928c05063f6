//! Links between ranks of one machine, by which they lend each other slabs: sockets of the kind that passes descriptors.
//!
//! A link keeps messages whole and in order (unix(7), SOCK_SEQPACKET), so a slab's descriptor comes with the first parcel that
//! lies in it. Its listener has an abstract name, so nothing lies in a file system, and what is closed leaves nothing behind.

use super::calls::later;
use crate::error::{Error, ErrorKind, Result};
use crate::staging::Slab;
use std::collections::VecDeque;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The longest message.
const MESSAGE: usize = 4096;
/// Connections that wait for `accept`. Ranks of a machine are fewer.
const BACKLOG: i32 = 1024;

/// A message on a link. Numbers of slabs count those that were lent on it, from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SlabMessage {
    /// The first one, of the rank that has connected: its number, the name of its process, and a proof that it is a rank of this
    /// load.
    Hello { rank: u32, owner: [u8; 16], secret: [u8; 16] },
    /// The answer to it.
    Welcome,
    /// The inodes of the slabs of this process that others may keep: it still has them, and they are registered.
    Keeps(Vec<u64>),
    /// A parcel lies in a slab, which begins with byte `begins` of its file. Its descriptor comes along the first time.
    Offer { parcel: u32, slab: u32, begins: u64, len: u64 },
    /// The parcel was copied. `again` is false if the device could not register the slab: no other one is wanted.
    Returned { parcel: u32, again: bool },
    /// The slab cannot be mapped.
    Refused { parcel: u32, why: String },
}

impl SlabMessage {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            SlabMessage::Hello { rank, owner, secret } => {
                bytes.push(0);
                bytes.extend(rank.to_le_bytes());
                bytes.extend(owner);
                bytes.extend(secret);
            }
            SlabMessage::Welcome => bytes.push(1),
            SlabMessage::Keeps(inodes) => {
                bytes.push(5);
                // Others map again what does not fit.
                bytes.extend(inodes.iter().take((MESSAGE - 1) / 8).flat_map(|inode| inode.to_le_bytes()));
            }
            SlabMessage::Offer { parcel, slab, begins, len } => {
                bytes.push(2);
                bytes.extend(parcel.to_le_bytes());
                bytes.extend(slab.to_le_bytes());
                bytes.extend(begins.to_le_bytes());
                bytes.extend(len.to_le_bytes());
            }
            SlabMessage::Returned { parcel, again } => {
                bytes.push(3);
                bytes.extend(parcel.to_le_bytes());
                bytes.push(u8::from(*again));
            }
            SlabMessage::Refused { parcel, why } => {
                bytes.push(4);
                bytes.extend(parcel.to_le_bytes());
                bytes.extend(why.as_bytes());
            }
        }
        bytes.truncate(MESSAGE);
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<SlabMessage> {
        let (&kind, rest) = bytes.split_first()?;
        let word = |at: usize| Some(u32::from_le_bytes(*rest.get(at..at + 4)?.first_chunk()?));
        let long = |at: usize| Some(u64::from_le_bytes(*rest.get(at..at + 8)?.first_chunk()?));
        Some(match (kind, rest.len()) {
            (0, 36) => {
                SlabMessage::Hello { rank: word(0)?, owner: *rest[4..].first_chunk()?, secret: *rest.last_chunk()? }
            }
            (1, 0) => SlabMessage::Welcome,
            (2, 24) => SlabMessage::Offer { parcel: word(0)?, slab: word(4)?, begins: long(8)?, len: long(16)? },
            (3, 5) => SlabMessage::Returned { parcel: word(0)?, again: rest[4] != 0 },
            (5, bytes) if bytes % 8 == 0 => {
                let inodes = rest.chunks_exact(8).filter_map(|inode| Some(u64::from_le_bytes(*inode.first_chunk()?)));
                SlabMessage::Keeps(inodes.collect())
            }
            (4, 4..) => {
                SlabMessage::Refused { parcel: word(0)?, why: String::from_utf8_lossy(&rest[4..]).into_owned() }
            }
            _ => return None,
        })
    }
}

/// The place at which a rank waits for its neighbours.
#[derive(Debug)]
pub(super) struct SlabListener(OwnedFd);

impl SlabListener {
    /// Listens at the abstract name of these bytes.
    pub(super) fn new(name: &[u8; 16]) -> Result<SlabListener> {
        let refused = |what: &str| Error::io(what, &io::Error::last_os_error());
        let fd = socket().map_err(|e| Error::io("open a unix socket", &e))?;
        let (address, len) = address(name);
        // SAFETY: an address of that length, and our own socket.
        if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
            return Err(refused("bind a unix socket"));
        }
        // SAFETY: our own socket.
        if unsafe { libc::listen(fd.as_raw_fd(), BACKLOG) } != 0 {
            return Err(refused("listen at a unix socket"));
        }
        Ok(SlabListener(fd))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// A process of the same user that has connected, if there is one. One of another user is turned away.
    ///
    /// # Errors
    /// The system refuses to accept connections: there are too many descriptors, for example.
    pub(super) fn accept(&self) -> Result<Option<SlabLink>> {
        loop {
            let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
            // SAFETY: no address is asked for; the result is checked.
            let fd = unsafe { libc::accept4(self.fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags) };
            if fd < 0 {
                let why = io::Error::last_os_error();
                match why.kind() {
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ if later(&why) => return Ok(None),
                    _ => return Err(Error::io("accept a connection of another rank", &why)),
                }
            }
            // SAFETY: the call gave a new descriptor that nobody else owns.
            let link = SlabLink::new(unsafe { OwnedFd::from_raw_fd(fd) });
            return Ok(Some(link).filter(SlabLink::is_of_this_user));
        }
    }
}

/// A connection to a rank of this machine.
pub(super) struct SlabLink {
    fd: OwnedFd,
    /// Messages that wait for room, and the slab whose descriptor goes along.
    out: VecDeque<(Vec<u8>, Option<Arc<Slab>>)>,
    /// Slabs that were lent on this link, in the order of their numbers: device and inode.
    lent: Vec<(u64, u64)>,
    /// True if the first message has to be tried again after a pause.
    waits: bool,
    /// Slabs of the other rank by their numbers, or why it could not be mapped.
    borrowed: Vec<Result<Arc<Slab>>>,
}

impl SlabLink {
    fn new(fd: OwnedFd) -> SlabLink {
        SlabLink { fd, out: VecDeque::new(), lent: Vec::new(), waits: false, borrowed: Vec::new() }
    }

    /// Connects to the listener of a rank of this machine.
    pub(super) fn connect(name: &[u8; 16]) -> Result<SlabLink> {
        let fd = socket().map_err(|e| Error::io("open a unix socket", &e))?;
        let (address, len) = address(name);
        // SAFETY: an address of that length, and our own socket.
        if unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
            let why = io::Error::last_os_error();
            return Err(Error::io("connect to the unix socket of another rank", &why));
        }
        let link = SlabLink::new(fd);
        if !link.is_of_this_user() {
            return Err(Error::new(ErrorKind::Invalid, "another user's process listens there"));
        }
        Ok(link)
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// True if its other end is a process of the same user.
    fn is_of_this_user(&self) -> bool {
        // SAFETY: it only returns a number.
        self.other_end().is_some_and(|other| other.uid == unsafe { libc::geteuid() })
    }

    /// The process at its other end; 0: it is in another namespace of processes.
    pub(super) fn process(&self) -> i32 {
        self.other_end().map_or(0, |other| other.pid)
    }

    /// Process and user at its other end (unix(7), SO_PEERCRED).
    fn other_end(&self) -> Option<libc::ucred> {
        let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        let into = (&raw mut found).cast();
        // SAFETY: it writes `len` bytes at most.
        let result = unsafe { libc::getsockopt(self.fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, into, &raw mut len) };
        (result == 0).then_some(found)
    }

    /// Messages wait for room.
    pub(super) fn wants_room(&self) -> bool {
        !self.out.is_empty() && !self.waits
    }

    /// True if a message has to be tried again after a pause: `poll` does not say when there is room for it.
    pub(super) fn waits(&self) -> bool {
        self.waits
    }

    /// Says something, as soon as there is room.
    pub(super) fn say(&mut self, message: &SlabMessage) -> io::Result<()> {
        self.out.push_back((message.bytes(), None));
        self.speak()
    }

    /// Offers a parcel that lies in a slab of this process.
    pub(super) fn offer(&mut self, parcel: u32, begins: u64, slab: Arc<Slab>) -> io::Result<()> {
        let identity = slab.identity().ok_or_else(|| io::Error::other("its slab is private"))?;
        let known = self.lent.iter().position(|known| *known == identity);
        let number = known.unwrap_or_else(|| {
            self.lent.push(identity);
            self.lent.len() - 1
        });
        let message = SlabMessage::Offer { parcel, slab: number as u32, begins, len: slab.len() as u64 };
        self.out.push_back((message.bytes(), Some(slab).filter(|_| known.is_none())));
        self.speak()
    }

    /// Sends what there is room for.
    pub(super) fn speak(&mut self) -> io::Result<()> {
        self.waits = false;
        while let Some((bytes, slab)) = self.out.front() {
            let fd = slab.as_ref().and_then(|slab| slab.memfd()).map(|fd| fd.as_raw_fd());
            match send(self.fd.as_raw_fd(), bytes, fd) {
                Ok(()) => drop(self.out.pop_front()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if later(&e) => return Ok(()),
                Err(e) if is_passing(&e) => {
                    self.waits = true;
                    return Ok(());
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The next message, and a descriptor if one comes along. `Ok(None)`: there is none now.
    pub(super) fn hear(&mut self) -> io::Result<Option<(SlabMessage, Option<OwnedFd>)>> {
        loop {
            return match receive(self.fd.as_raw_fd()) {
                Ok((bytes, _)) if bytes.is_empty() => Err(io::Error::other("it has closed its link")),
                Ok((bytes, fd)) => match SlabMessage::parse(&bytes) {
                    Some(message) => Ok(Some((message, fd))),
                    None => Err(io::Error::other("it sent an unknown message")),
                },
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if later(&e) => Ok(None),
                Err(e) => Err(e),
            };
        }
    }

    /// The slab of this number, which the other rank lends: `map` makes it of the descriptor that comes along.
    pub(super) fn borrow(
        &mut self,
        number: u32,
        fd: Option<OwnedFd>,
        map: impl FnOnce(OwnedFd) -> Result<Arc<Slab>>,
    ) -> Result<Arc<Slab>> {
        if self.borrowed.len() == number as usize {
            let none =
                || Error::new(ErrorKind::Limit, "no descriptor came with a slab: this process has too many open");
            self.borrowed.push(fd.ok_or_else(none).and_then(map));
        }
        let unknown = || Err(Error::new(ErrorKind::Peer, "a slab that was never lent"));
        self.borrowed.get(number as usize).cloned().unwrap_or_else(unknown)
    }
}

/// True if the error passes: too many descriptors of this user are on their way, or the kernel is short of memory.
fn is_passing(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ETOOMANYREFS | libc::ENOMEM | libc::ENOBUFS))
}

fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointer is passed; the result is checked.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call gave a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// An abstract address: a zero, and then a name of our own (unix(7)).
fn address(name: &[u8; 16]) -> (libc::sockaddr_un, libc::socklen_t) {
    // SAFETY: all zeros is a valid address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let text = format!("penstock-{}", name.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    for (to, from) in address.sun_path[1..].iter_mut().zip(text.bytes()) {
        *to = from as libc::c_char;
    }
    let len = size_of::<libc::sa_family_t>() + 1 + text.len();
    (address, len as libc::socklen_t)
}

/// Room for one descriptor beside a message, aligned as its header.
#[repr(C, align(8))]
struct Beside([u8; 64]);

fn send(socket: RawFd, bytes: &[u8], fd: Option<RawFd>) -> io::Result<()> {
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut beside = Beside([0; 64]);
    // SAFETY: all zeros is a valid message header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    if let Some(fd) = fd {
        // SAFETY: the buffer has room for the header and one descriptor, which cmsg(3) lays out.
        unsafe {
            message.msg_control = beside.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size_of::<RawFd>() as u32) as _;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as _;
            libc::CMSG_DATA(header).cast::<RawFd>().write_unaligned(fd);
        }
    }
    // SAFETY: the header names our own bytes.
    let sent = unsafe { libc::sendmsg(socket, &raw const message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
    if sent < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn receive(socket: RawFd) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut bytes = vec![0; MESSAGE];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let mut beside = Beside([0; 64]);
    // SAFETY: all zeros is a valid message header.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
    message.msg_control = beside.0.as_mut_ptr().cast();
    message.msg_controllen = beside.0.len() as _;
    // SAFETY: the header names our own bytes.
    let got = unsafe { libc::recvmsg(socket, &raw mut message, libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    bytes.truncate(got as usize);
    let mut found = None;
    // SAFETY: the kernel has filled the buffer as cmsg(3) lays it out. Each descriptor in it is new and ours alone.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while let Some(one) = header.as_ref() {
            if one.cmsg_level == libc::SOL_SOCKET && one.cmsg_type == libc::SCM_RIGHTS {
                let space = one.cmsg_len - libc::CMSG_LEN(0) as usize;
                for number in 0..space / size_of::<RawFd>() {
                    let fd = libc::CMSG_DATA(header).cast::<RawFd>().add(number).read_unaligned();
                    // One is expected. Others are closed.
                    found = Some(OwnedFd::from_raw_fd(fd));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    Ok((bytes, found))
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::source::wait_readable;
    use std::time::Duration;

    fn pair(name: u8) -> (SlabLink, SlabLink) {
        let name = [[name; 8], u64::from(std::process::id()).to_le_bytes()].concat();
        let name: [u8; 16] = name.try_into().unwrap();
        let listener = SlabListener::new(&name).unwrap();
        assert!(SlabListener::new(&name).is_err(), "the name is taken");
        assert!(listener.accept().unwrap().is_none());
        let there = SlabLink::connect(&name).unwrap();
        (listener.accept().unwrap().unwrap(), there)
    }

    fn heard(link: &mut SlabLink) -> (SlabMessage, Option<OwnedFd>) {
        wait_readable([link.fd()], Some(Duration::from_secs(20)));
        link.hear().unwrap().unwrap()
    }

    #[test]
    fn messages_come_whole_and_in_order() {
        let (mut here, mut there) = pair(1);
        let all = [
            SlabMessage::Hello { rank: 7, owner: [8; 16], secret: [9; 16] },
            SlabMessage::Welcome,
            SlabMessage::Keeps(vec![3, u64::MAX]),
            SlabMessage::Keeps(Vec::new()),
            SlabMessage::Offer { parcel: 3, slab: 1, begins: 1 << 40, len: 8 << 20 },
            SlabMessage::Returned { parcel: 3, again: true },
            SlabMessage::Returned { parcel: 4, again: false },
            SlabMessage::Refused { parcel: 3, why: "no memory".to_owned() },
        ];
        all.iter().for_each(|message| here.say(message).unwrap());
        for message in all {
            let (heard, fd) = heard(&mut there);
            assert!(heard == message && fd.is_none(), "{heard:?}");
        }
        assert!(there.hear().unwrap().is_none());
        drop(here);
        assert!(there.hear().is_err(), "it is closed");
    }

    #[test]
    fn a_text_that_is_too_long_is_cut_and_what_is_no_message_is_an_error() {
        let (mut here, mut there) = pair(2);
        here.say(&SlabMessage::Refused { parcel: 1, why: "x".repeat(5000) }).unwrap();
        let (SlabMessage::Refused { why, .. }, _) = heard(&mut there) else { panic!() };
        assert_eq!(why.len(), MESSAGE - 5);
        for odd in [&[9u8][..], &[0, 1], &[2; 24], &[3; 9], &[4; 3], &[5; 12]] {
            send(here.fd(), odd, None).unwrap();
            assert!(there.hear().is_err(), "{odd:?}");
        }
    }

    #[test]
    fn nobody_listens_under_an_unknown_name() {
        assert!(SlabLink::connect(&[0xee; 16]).is_err());
    }
}
