//! The types that options have: their texts, and what Python takes and gives for them.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::ops::Deref;
use std::time::Duration;

/// Kind of values that an option or a setting takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Yes or no.
    Flag,
    /// Yes, no, or neither.
    Undecided,
    /// One of these texts.
    Choice(&'static [&'static str]),
    /// Bytes, or a text such as "256MiB".
    Size,
    /// Bytes, or "auto".
    SizeOrAuto,
    /// A whole number.
    Count,
    /// A time, whole or not.
    Seconds,
    /// Any text that `parse` takes.
    Text,
    /// A text that is shown to nobody.
    Secret,
    /// A list of texts, or a text with commas.
    Names,
    /// A path.
    File,
    /// A function. It has no text: neither a variable nor a command can give it.
    Callable,
}

/// The value of an option, as it is shown.
#[derive(Debug, Clone, PartialEq)]
pub enum Shown<'a> {
    /// Yes, no, or neither.
    Flag(Option<bool>),
    /// Bytes, or a count.
    Whole(u64),
    /// A time.
    Seconds(f64),
    /// A text.
    Text(Cow<'a, str>),
}

/// As Python writes it.
impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shown::Flag(yes) => f.write_str(yes.map_or("None", |yes| if yes { "True" } else { "False" })),
            Shown::Whole(number) => number.fmt(f),
            Shown::Seconds(seconds) => seconds.fmt(f),
            Shown::Text(text) => write!(f, "{text:?}"),
        }
    }
}

/// A type that options have.
pub trait OptionValue: Sized {
    /// Kind of values.
    const FORM: Form;
    /// Word that stands for a value in the help of the command line.
    const WORD: &'static str;

    /// The value that a text means.
    ///
    /// # Errors
    /// Says what such a text must be.
    fn parse(text: &str) -> Result<Self, String>;

    /// The value as it is shown.
    fn shown(&self) -> Shown<'_>;
}

/// The types of options: kind of values, word, parser, and the value as it is shown.
macro_rules! values {
    ($($kind:ty: $form:ident, $word:literal, $parse:expr, |$value:ident| $shown:expr;)*) => { $(
        impl OptionValue for $kind {
            const FORM: Form = Form::$form;
            const WORD: &'static str = $word;

            fn parse(text: &str) -> Result<Self, String> {
                ($parse)(text)
            }

            fn shown(&self) -> Shown<'_> {
                let $value = self;
                $shown
            }
        }
    )* };
}
values! {
    bool: Flag, "BOOL",
        |text: &str| undecided(text)?.ok_or_else(|| "must be true or false".to_owned()), |yes| Shown::Flag(Some(*yes));
    Option<bool>: Undecided, "BOOL", undecided, |yes| Shown::Flag(*yes);
    u64: Size, "SIZE", size, |bytes| Shown::Whole(*bytes);
    Option<u64>: SizeOrAuto, "SIZE", size_or_auto, |bytes| bytes.map_or(Shown::Text("auto".into()), Shown::Whole);
    u32: Count, "N", count, |number| Shown::Whole(u64::from(*number));
    Duration: Seconds, "SECONDS", seconds, |time| Shown::Seconds(time.as_secs_f64());
    FileName: File, "FILE", |text: &str| Ok(FileName(text.to_owned())), |name| Shown::Text((&name.0).into());
    Bind: Text, "PLACE", Bind::parse, |place| Shown::Text(place.to_string().into());
    Option<Ports>: Text, "FIRST-LAST",
        |text: &str| (!text.is_empty()).then(|| Ports::parse(text)).transpose(),
        |ports| Shown::Text(ports.map_or_else(String::new, |ports| ports.to_string()).into());
}

/// The texts of a type with a fixed set of values, and the word for it.
macro_rules! spelled {
    ($kind:ident: $word:literal; $($value:ident = $text:literal),*) => {
        impl OptionValue for $kind {
            const FORM: Form = Form::Choice(&[$($text),*]);
            const WORD: &'static str = $word;

            fn parse(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok($kind::$value),)*
                    _ => Err(format!("must be one of {}", [$(concat!("\"", $text, "\"")),*].join(", "))),
                }
            }

            fn shown(&self) -> Shown<'_> {
                Shown::Text(Cow::Borrowed(match self { $($kind::$value => $text),* }))
            }
        }
    };
}

/// The way of reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Io {
    /// Chosen per extent from file system, residency, device and cache policy.
    #[default]
    Auto,
    /// The page cache is mapped (CPU targets only).
    Mapped,
    /// Reads through the page cache, by a pool of threads.
    Buffered,
    /// Reads through the page cache, by io_uring.
    UringBuffered,
    /// O_DIRECT, by io_uring, or by a pool of threads if this kernel refuses it.
    Direct,
    /// O_DIRECT through io_uring.
    Uring,
    /// O_DIRECT through a pool of threads.
    Threads,
}

spelled!(
    Io: "HOW"; Auto = "auto", Mapped = "mapped", Buffered = "buffered", UringBuffered = "uring_buffered",
    Direct = "direct", Uring = "uring", Threads = "threads"
);

/// The effect of a load on the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cache {
    /// Keep what is mapped. Keep copies too if that costs nothing, judged by the memory left and the pace of the
    /// storage. Otherwise bypass.
    #[default]
    Auto,
    /// Cold bytes go through the page cache, so that the next start is warm.
    Keep,
    /// Cold bytes leave the page cache as it was.
    Bypass,
}

spelled!(Cache: "WHAT"; Auto = "auto", Keep = "keep", Bypass = "bypass");

/// The choice of ranks that load together: one reads shared bytes for all, or each reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Exchanging {
    /// They try both ways, and go on in the quicker one.
    #[default]
    Auto,
    /// One rank reads a shared byte and sends it to the others.
    On,
    /// Each rank reads all bytes that it wants.
    Off,
}

spelled!(Exchanging: "auto|on|off"; Auto = "auto", On = "on", Off = "off");

/// The ranks that read for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scope {
    /// All of them.
    #[default]
    World,
    /// Ranks of one machine. Each machine reads all bytes that its ranks want.
    Node,
}

spelled!(Scope: "world|node"; World = "world", Node = "node");

/// The ports at which a rank listens for the others: the first and the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports(u16, u16);

impl Ports {
    /// Ports from a text such as "40000-40100".
    ///
    /// # Errors
    /// Says what such a text must be.
    pub fn parse(text: &str) -> Result<Ports, String> {
        let port = |text: &str| match !text.is_empty() && text.len() <= 5 && text.bytes().all(|b| b.is_ascii_digit()) {
            true => text.parse::<u16>().ok().filter(|port| *port > 0),
            false => None,
        };
        let range = text.split_once('-').and_then(|(first, last)| Some((port(first)?, port(last)?)));
        match range {
            // A rank that meets the others listens at two ports: for them, and for the question whether it is there.
            Some((first, last)) if first < last => Ok(Ports(first, last)),
            Some((first, last)) if first == last => Err("must be two ports or more: a rank needs two at a time".into()),
            Some(_) => Err("must begin with the lower port".into()),
            None => Err("must be a range of ports from 1 to 65535, such as \"40000-40100\"".into()),
        }
    }

    /// How many there are.
    pub fn count(self) -> usize {
        usize::from(self.1 - self.0) + 1
    }

    /// All of them, from the one at this place among them to the one before it.
    pub fn from(self, place: usize) -> impl Iterator<Item = u16> {
        let count = self.count();
        (0..count).map(move |step| self.0 + ((place + step) % count) as u16)
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.0, self.1)
    }
}

/// The address at which a rank listens, and which the other ranks reach.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Bind {
    /// The address from which this rank reaches the rendezvous store.
    #[default]
    Chosen,
    /// An address of this machine.
    Address(IpAddr),
    /// An address of this interface.
    Interface(String),
}

impl Bind {
    /// An address or the name of an interface; an empty text leaves the choice to Penstock.
    ///
    /// # Errors
    /// Says what such a text must be, or why others cannot reach this address.
    pub fn parse(text: &str) -> Result<Bind, String> {
        if text.is_empty() {
            return Ok(Bind::Chosen);
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            let refused = match address {
                _ if address.is_unspecified() => Some("is no address that others can reach: name one of this machine"),
                _ if address.is_multicast() => Some("is a multicast address: name one of this machine"),
                IpAddr::V4(v4) if v4.is_broadcast() => Some("is a broadcast address: name one of this machine"),
                IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80 => {
                    Some("is a link-local address, which means another interface on each machine: name a routed one")
                }
                _ => None,
            };
            return refused.map_or(Ok(Bind::Address(address)), |why| Err(why.into()));
        }
        // The kernel's rule for a name (dev_valid_name), in visible ASCII. getifaddrs(3) gives the label of an IPv4
        // address in place of the name. A label has a colon: "eth0:1".
        let (name, label) = text.split_once(':').unwrap_or((text, "none"));
        let is_name = text.len() <= 15 && !matches!(name, "" | "." | "..") && !label.is_empty();
        let is_name = is_name && text.bytes().all(|b| b.is_ascii_graphic() && b != b'/') && !label.contains(':');
        // An address and a port, such as "10.0.0.7:80", is no label.
        let is_name = is_name && name.parse::<IpAddr>().is_err();
        match is_name {
            true => Ok(Bind::Interface(text.to_owned())),
            false => {
                Err("must be an address such as \"10.0.0.7\" or \"fd00::7\", or an interface such as \"eth0\"".into())
            }
        }
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bind::Chosen => Ok(()),
            Bind::Address(address) => address.fmt(f),
            Bind::Interface(name) => f.write_str(name),
        }
    }
}

/// The order in which tensors are read and handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Order {
    /// As they stand in the files.
    #[default]
    File,
    /// Grouped by layer (the first number in the name); within a group in the order of the files.
    Layer,
    /// The order of the wants. For a save: the order of its tensors, as `File`.
    Asked,
}

fn undecided(text: &str) -> Result<Option<bool>, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" => Ok(Some(true)),
        "0" | "false" | "no" => Ok(Some(false)),
        "" | "none" | "auto" => Ok(None),
        _ => Err("must be true, false or none".into()),
    }
}

fn size_or_auto(text: &str) -> Result<Option<u64>, String> {
    match text.trim() {
        "auto" => Ok(None),
        text => size(text).map(Some).map_err(|why| format!("{why}, or \"auto\"")),
    }
}

fn count(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "must be a whole number, 0 or more".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.trim().parse::<f64>() {
        // Less than a nanosecond is no time.
        Ok(seconds) if (1e-9..1e9).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        Ok(_) => Err("must be a positive number of seconds".into()),
        Err(_) => Err("must be a number of seconds".into()),
    }
}

/// Bytes from "64MiB", "1.5 GB" or "4096".
///
/// # Errors
/// Says what such a text must be.
pub fn size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" | "k" => 1024.0,
        "mib" | "m" => 1048576.0,
        "gib" | "g" => 1073741824.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        _ => return Err("must be bytes, or a number with B, KB, MB, GB, KiB, MiB or GiB".into()),
    };
    let number: f64 = number.parse().map_err(|_| "must be bytes, or a size such as \"256MiB\"".to_owned())?;
    let bytes = number * factor;
    if bytes > 9e18 {
        return Err("is out of range".into());
    }
    Ok(bytes as u64)
}

/// The name of a file; empty: none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileName(pub String);

impl Deref for FileName {
    type Target = str;
    fn deref(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_a_range_of_two_or_more() {
        let ports = Ports::parse("40000-40002").unwrap();
        assert_eq!((ports.count(), ports.to_string().as_str()), (3, "40000-40002"));
        assert_eq!(ports.from(2).collect::<Vec<_>>(), [40002, 40000, 40001]);
        assert_eq!(Ports::parse("1-65535").unwrap().from(65534).next(), Some(65535));
        for wrong in
            ["", "40000", "40000-", "-40000", "40000:40100", "0-10", "40000-65536", "+1-5", " 1-5", "1-5-9", "a-b"]
        {
            assert!(Ports::parse(wrong).unwrap_err().contains("40000-40100"), "{wrong:?}");
        }
        assert!(Ports::parse("5-4").unwrap_err().contains("lower port"));
        assert!(Ports::parse("5-5").unwrap_err().contains("two"));
    }

    #[test]
    fn a_rank_listens_where_others_can_reach_it() {
        assert_eq!(Bind::parse(""), Ok(Bind::Chosen));
        assert_eq!(Bind::parse("10.0.0.7"), Ok(Bind::Address("10.0.0.7".parse().unwrap())));
        assert_eq!(Bind::parse("fd00::7"), Ok(Bind::Address("fd00::7".parse().unwrap())));
        for name in ["eth0.100", "eth0:1", "br-1:vip", "a-name-of-15:ab"] {
            assert_eq!(Bind::parse(name), Ok(Bind::Interface(name.into())));
        }
        for unreachable in ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "fe80::1"] {
            assert!(Bind::parse(unreachable).is_err(), "{unreachable}");
        }
        for wrong in [
            "10.0.0.7:80",
            "[fd00::7]",
            "[fd00:7]:80",
            "fe80::1%eth0",
            "eth0:",
            ":1",
            "..:1",
            "eth0:1:2",
            "a-name-of-15:abc",
            "eth 0",
            "a/b",
            "a-name-that-is-too-long",
            " eth0",
            "..",
            "ethö",
        ] {
            assert!(Bind::parse(wrong).unwrap_err().contains("eth0"), "{wrong:?}");
        }
    }
}
