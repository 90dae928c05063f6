//! The secret that ranks of one load share, if they share one: it shows that they belong together.
//!
//! It comes from the environment alone. It is no option, because options are shown and compared, and it never leaves the
//! process: others see only codes (HMAC-SHA256, RFC 2104) that nobody can make without it.

use crate::error::{Error, ErrorKind, Result};
use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStringExt;

/// The variable that holds the secret.
pub(super) const KEY: &str = "PENSTOCK_PEER_KEY";
/// The variable that names a file with the secret.
pub(super) const KEY_FILE: &str = "PENSTOCK_PEER_KEY_FILE";
/// The shortest secret, in bytes. An attacker who knows a code and its input can try secrets, and finds shorter ones.
const SHORTEST: usize = 16;
/// A longer one is some other file.
const LONGEST: usize = 4096;

/// Bytes of a code.
pub(super) const CODE: usize = 32;
/// Bytes of a random number that is used once.
pub(super) const NONCE: usize = 16;

/// The secret. Nothing shows it.
#[derive(Clone)]
pub struct PeerKey(hmac::Key);

impl fmt::Debug for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerKey(..)")
    }
}

impl PeerKey {
    /// The secret of this process, if it has one: that in `PENSTOCK_PEER_KEY`, or in the file that `PENSTOCK_PEER_KEY_FILE`
    /// names. White space around it does not count. Reads the file each time: a secret may be renewed.
    ///
    /// # Errors
    /// `Invalid`: it is shorter than 16 bytes or longer than 4096, or both variables are set. Otherwise what the kernel says of
    /// the file. No error holds the secret.
    pub fn of_environment() -> Result<Option<PeerKey>> {
        let file =
            |path: &OsString| std::fs::read(path).map_err(|e| Error::io(&format!("read {KEY_FILE}"), &e).at(path));
        match (std::env::var_os(KEY), std::env::var_os(KEY_FILE)) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) => {
                let text = format!("{KEY} and {KEY_FILE} are both set: set one of them");
                Err(Error::invalid(text))
            }
            (Some(secret), None) => PeerKey::new(&secret.into_vec(), KEY).map(Some),
            (None, Some(path)) => PeerKey::new(&file(&path)?, KEY_FILE).map_err(|e| e.at(&path)).map(Some),
        }
    }

    /// The key that these bytes are. `from`: the variable they came from.
    ///
    /// # Errors
    /// `Invalid`: there are too few of them, or too many.
    pub fn new(secret: &[u8], from: &str) -> Result<PeerKey> {
        let secret = secret.trim_ascii();
        let wrong = match secret.len() {
            0 => "is empty".to_owned(),
            short @ 1..SHORTEST => format!("has {short} bytes"),
            long if long > LONGEST => format!("has {long} bytes"),
            _ => return Ok(PeerKey(hmac::Key::new(hmac::HMAC_SHA256, secret))),
        };
        let needs = format!("a secret has {SHORTEST} to {LONGEST} bytes (`openssl rand -hex 32` makes one)");
        Err(Error::invalid(format!("{from} {wrong}: {needs}; unset it to load without one")))
    }

    /// A code of these bytes, one after the other. `label` says what it is for: a code of one use is none of another.
    pub(super) fn code(&self, label: &str, of: &[&[u8]]) -> [u8; CODE] {
        let mut code = [0; CODE];
        code.copy_from_slice(hmac::sign(&self.0, &together(label, of)).as_ref());
        code
    }

    /// Whether this is their code. Takes the same time wherever it differs.
    pub(super) fn is_code(&self, code: &[u8], label: &str, of: &[&[u8]]) -> bool {
        hmac::verify(&self.0, &together(label, of), code).is_ok()
    }

    /// The code that a rank leaves for all ranks to compare before they connect. It means nothing elsewhere.
    /// `seed`: random bytes of that rank.
    pub fn mark(&self, rank: u32, seed: &[u8]) -> [u8; CODE] {
        self.code(MARK, &[&rank.to_le_bytes(), seed])
    }

    /// Whether a rank that has left this mark has the same secret.
    pub fn is_mark(&self, mark: &[u8], rank: u32, seed: &[u8]) -> bool {
        self.is_code(mark, MARK, &[&rank.to_le_bytes(), seed])
    }
}

/// The pass that a rank shows the others.
#[derive(Debug, Clone)]
pub struct Pass {
    /// Its number.
    pub rank: u32,
    /// Random bytes. Those of rank 0 name the load; by its own a rank is known to those that ask whether it is there.
    pub token: [u8; 16],
    /// The key that all ranks have, if they have one.
    pub key: Option<PeerKey>,
}

const MARK: &str = "penstock: a rank has this key";

/// Each part with its length, so that no two lists of parts are the same bytes.
fn together(label: &str, of: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in [label.as_bytes()].iter().chain(of) {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(*part);
    }
    bytes
}

/// Random bytes of the system.
///
/// # Errors
/// `Internal`: it has none.
pub(super) fn nonce() -> Result<[u8; NONCE]> {
    let mut bytes = [0; NONCE];
    let none = |_| Error::new(ErrorKind::Internal, "the system gives no random bytes (getrandom)");
    SystemRandom::new().fill(&mut bytes).map_err(none)?;
    Ok(bytes)
}

/// A digest of a secret number, which others may know.
pub(super) fn digest(of: &[u8; 16]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes.copy_from_slice(
        &ring::digest::digest(&ring::digest::SHA256, &together("penstock: a rank is here", &[of])).as_ref()[..16],
    );
    bytes
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const SECRET: &[u8] = b"a secret that nobody has seen";

    #[test]
    fn a_code_is_that_of_one_key_one_use_and_one_list_of_parts() {
        let key = PeerKey::new(SECRET, KEY).unwrap();
        let code = key.code("use", &[b"ab", b"c"]);
        assert!(key.is_code(&code, "use", &[b"ab", b"c"]));
        assert!(!key.is_code(&code, "use", &[b"a", b"bc"]), "other parts");
        assert!(!key.is_code(&code, "another use", &[b"ab", b"c"]));
        assert!(!key.is_code(&code[..31], "use", &[b"ab", b"c"]), "a part of the code");
        assert!(!PeerKey::new(b"another secret, as long as that", KEY).unwrap().is_code(&code, "use", &[b"ab", b"c"]));
    }

    #[test]
    fn a_code_is_hmac_sha256() {
        // RFC 4231, test case 2
        let key = hmac::Key::new(hmac::HMAC_SHA256, b"Jefe");
        let code = hmac::sign(&key, b"what do ya want for nothing?");
        assert_eq!(code.as_ref()[..4], [0x5b, 0xdc, 0xc1, 0x46]);
    }

    #[test]
    fn white_space_around_a_secret_does_not_count() {
        let [plain, from_a_file] =
            [SECRET, b"\n a secret that nobody has seen\r\n"].map(|s| PeerKey::new(s, KEY).unwrap());
        assert!(plain.is_mark(&from_a_file.mark(3, b"seed"), 3, b"seed"));
        assert!(!plain.is_mark(&from_a_file.mark(3, b"seed"), 2, b"seed"), "that of another rank");
    }

    #[test]
    fn a_secret_that_can_be_guessed_is_refused_and_no_error_shows_it() {
        for short in [&b""[..], b" \n", b"hunter2hunter2", &[b'x'; 5000]] {
            let error = PeerKey::new(short, KEY).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let text = error.to_string();
            assert!(text.starts_with(KEY) && text.contains("openssl"), "{text}");
            assert!(!text.contains("hunter2") && !text.contains("xxx"), "{text}");
        }
    }

    #[test]
    fn nothing_shows_a_key() {
        let shown = format!("{:?}", PeerKey::new(SECRET, KEY).unwrap());
        assert_eq!(shown, "PeerKey(..)");
    }

    #[test]
    fn random_numbers_differ() {
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }
}
