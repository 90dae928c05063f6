//! The handshake of two ranks before a connection is used: who they are, and the proof.
//!
//! It has no sockets and no clock: bytes go in, and bytes to send come out. Three messages:
//!
//! 1. The rank that has connected says what it is: the load, both ranks, which connection this is, a random number.
//! 2. The other rank answers with the same of itself, and with its proof.
//! 3. The first rank gives its proof.
//!
//! A proof is a code ([`PeerKey`](super::key::PeerKey)) of both ranks' words. So it is worth nothing on another connection (both have
//! given a random number), for another load, rank or connection (all are in the words), or in the other direction (its label
//! says who gives it). Ranks without a key leave proofs out; the third message then does not exist.

use super::key::{nonce, Pass, CODE, NONCE};
use crate::error::Result;

const MAGIC: &[u8; 8] = b"penstock";
/// The layout of these messages.
const VERSION: u8 = 5;
/// Bytes of a rank's words: what it is, layout, whether it has a key, which connection, two bytes of zero, its rank, that of
/// the other, the load, a random number.
pub(super) const WORDS: usize = 8 + 4 + 4 + 4 + 16 + NONCE;
/// Labels of proofs.
const ANSWERS: &str = "penstock: the rank that was called";
const CALLS: &str = "penstock: the rank that has called";

/// The purpose of a connection between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// For bytes.
    Data = 0,
    /// For words.
    Control = 1,
    /// Between loads.
    Standing = 2,
}

impl Purpose {
    fn of(number: u8) -> Option<Purpose> {
        [Purpose::Data, Purpose::Control, Purpose::Standing].into_iter().find(|kind| *kind as u8 == number)
    }
}

/// The progress of a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HandshakeStep {
    /// More of it has to come.
    More,
    /// It is whole. These bytes are the answer, and another message is to come.
    Say(Vec<u8>),
    /// Both have shown what they are. These bytes, if there are any, are the last.
    Met(u32, Purpose, Vec<u8>),
    /// The other end is none of ours.
    Refused(Rejection),
}

/// The reason that the other end of a connection is not a rank of this load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rejection {
    /// It does not speak as ranks do.
    Garbage,
    /// It is a rank of another load, or another rank than it should be.
    Other,
    /// It has a key, and this rank has none; or the other way round.
    OnlyOne(bool),
    /// It has another key.
    Differs,
}

impl Rejection {
    /// The words of an error, after the name of the rank that should be there.
    pub(super) fn text(self) -> String {
        match self {
            Rejection::Garbage | Rejection::Other => "another load answers at its address".into(),
            Rejection::OnlyOne(true) => format!("{KEY_DIFFERS}: it has a key, and this rank has none"),
            Rejection::OnlyOne(false) => format!("{KEY_DIFFERS}: it has no key, and this rank has one"),
            Rejection::Differs => format!("{KEY_DIFFERS}: it has another key"),
        }
    }

    /// Whether it is for the key.
    pub(super) fn is_of_key(self) -> bool {
        matches!(self, Rejection::OnlyOne(_) | Rejection::Differs)
    }
}

/// How errors begin that are about the key.
const KEY_DIFFERS: &str = "PENSTOCK_PEER_KEY differs";

type Words = [u8; WORDS];

/// One end of a connection that is not in use yet.
#[derive(Debug)]
pub(super) struct Handshake {
    have: Vec<u8>,
    state: Awaiting,
}

#[derive(Debug)]
enum Awaiting {
    /// It was called, by whoever it is.
    Called,
    /// It has called this rank with these words.
    Calls(u32, Purpose, Box<Words>),
    /// It has answered, and waits for the proof of these words: its caller's and its own.
    Answered(u32, Purpose, Box<(Words, Words)>),
    /// It has answered only to say what it is: one of the two has no key.
    Apart(Rejection),
    Over,
}

impl Handshake {
    /// The end that has connected to a rank, and what it says first.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(super) fn call(me: &Pass, to: u32, kind: Purpose) -> Result<(Handshake, Vec<u8>)> {
        let words = words(me, to, kind)?;
        Ok((Handshake { have: Vec::new(), state: Awaiting::Calls(to, kind, Box::new(words)) }, words.to_vec()))
    }

    /// The end that was connected to.
    pub(super) fn answer() -> Handshake {
        Handshake { have: Vec::new(), state: Awaiting::Called }
    }

    /// Bytes that are still awaited of the message that comes. What comes after it is no part of it.
    pub(super) fn awaits(&self, me: &Pass) -> usize {
        let message = match self.state {
            Awaiting::Called => WORDS,
            Awaiting::Calls(..) if me.key.is_some() => WORDS + CODE,
            Awaiting::Calls(..) => WORDS,
            Awaiting::Answered(..) => CODE,
            Awaiting::Apart(_) | Awaiting::Over => 0,
        };
        // One without a key sends no proof, and what it says shows that.
        message - self.have.len()
    }

    /// Whether nothing has come yet.
    pub(super) fn is_silent(&self) -> bool {
        self.have.is_empty() && !self.is_answered()
    }

    /// Whether it was called by a rank that knows the load.
    pub(super) fn is_answered(&self) -> bool {
        matches!(self.state, Awaiting::Answered(..))
    }

    /// The reason that nothing more is to come, though an answer was sent.
    pub(super) fn ended(&self) -> Option<Rejection> {
        match self.state {
            Awaiting::Apart(why) => Some(why),
            _ => None,
        }
    }

    /// Takes bytes that came, at most as many as it awaits.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(super) fn hear(&mut self, me: &Pass, bytes: &[u8]) -> Result<HandshakeStep> {
        self.have.extend(&bytes[..bytes.len().min(self.awaits(me))]);
        let known = MAGIC.len().min(self.have.len());
        if !matches!(self.state, Awaiting::Answered(..)) && self.have[..known] != MAGIC[..known] {
            return Ok(self.refuse(Rejection::Garbage));
        }
        // A rank without a key stops after its words.
        let shows = matches!(self.state, Awaiting::Calls(..)) && self.have.len() >= WORDS;
        if self.awaits(me) > 0 && !(shows && self.have[9] == 0) {
            return Ok(HandshakeStep::More);
        }
        let have = std::mem::take(&mut self.have);
        match std::mem::replace(&mut self.state, Awaiting::Over) {
            Awaiting::Called => self.on_call(me, &have),
            Awaiting::Calls(to, kind, mine) => Ok(self.on_answer(me, (to, kind, &mine), &have)),
            Awaiting::Answered(from, kind, said) => Ok(match &me.key {
                Some(key) if !key.is_code(&have, CALLS, &[&said.0, &said.1]) => {
                    HandshakeStep::Refused(Rejection::Differs)
                }
                _ => HandshakeStep::Met(from, kind, Vec::new()),
            }),
            Awaiting::Apart(why) => Ok(HandshakeStep::Refused(why)),
            Awaiting::Over => Ok(HandshakeStep::Refused(Rejection::Garbage)),
        }
    }

    fn refuse(&mut self, why: Rejection) -> HandshakeStep {
        self.state = Awaiting::Over;
        HandshakeStep::Refused(why)
    }

    /// The words of a caller.
    fn on_call(&mut self, me: &Pass, have: &[u8]) -> Result<HandshakeStep> {
        let Some(theirs) = parsed(have) else { return Ok(HandshakeStep::Refused(Rejection::Garbage)) };
        if theirs.token != me.token || theirs.to != me.rank || theirs.from == me.rank {
            return Ok(HandshakeStep::Refused(Rejection::Other));
        }
        let mine = words(me, theirs.from, theirs.kind)?;
        let mut said = mine.to_vec();
        // The answer goes out in any case: the caller is to name what is wrong.
        if let Some(key) = &me.key {
            said.extend(key.code(ANSWERS, &[have, &mine]));
        }
        if theirs.keyed != me.key.is_some() {
            self.state = Awaiting::Apart(Rejection::OnlyOne(theirs.keyed));
            return Ok(HandshakeStep::Say(said));
        }
        if me.key.is_none() {
            return Ok(HandshakeStep::Met(theirs.from, theirs.kind, said));
        }
        let mut words = [0; WORDS];
        words.copy_from_slice(have);
        self.state = Awaiting::Answered(theirs.from, theirs.kind, Box::new((words, mine)));
        Ok(HandshakeStep::Say(said))
    }

    /// The answer of a rank that was called.
    fn on_answer(&self, me: &Pass, (to, kind, mine): (u32, Purpose, &Words), have: &[u8]) -> HandshakeStep {
        let Some(theirs) = parsed(&have[..WORDS]) else { return HandshakeStep::Refused(Rejection::Garbage) };
        if theirs.token != me.token || theirs.to != me.rank || theirs.from != to || theirs.kind != kind {
            return HandshakeStep::Refused(Rejection::Other);
        }
        let Some(key) = &me.key else {
            return match theirs.keyed {
                true => HandshakeStep::Refused(Rejection::OnlyOne(true)),
                false => HandshakeStep::Met(to, kind, Vec::new()),
            };
        };
        if !theirs.keyed {
            return HandshakeStep::Refused(Rejection::OnlyOne(false));
        }
        let (words, proof) = have.split_at(WORDS);
        if !key.is_code(proof, ANSWERS, &[mine, words]) {
            return HandshakeStep::Refused(Rejection::Differs);
        }
        HandshakeStep::Met(to, kind, key.code(CALLS, &[mine, words]).to_vec())
    }
}

/// The first message of a rank, taken apart.
struct Said {
    keyed: bool,
    kind: Purpose,
    from: u32,
    to: u32,
    token: [u8; 16],
}

fn words(me: &Pass, to: u32, kind: Purpose) -> Result<Words> {
    let mut words = [0; WORDS];
    words[..8].copy_from_slice(MAGIC);
    words[8..12].copy_from_slice(&[VERSION, u8::from(me.key.is_some()), kind as u8, 0]);
    words[12..16].copy_from_slice(&me.rank.to_le_bytes());
    words[16..20].copy_from_slice(&to.to_le_bytes());
    words[20..36].copy_from_slice(&me.token);
    words[36..].copy_from_slice(&nonce()?);
    Ok(words)
}

fn parsed(words: &[u8]) -> Option<Said> {
    let number = |at: usize| Some(u32::from_le_bytes(words.get(at..at + 4)?.try_into().ok()?));
    if words.len() != WORDS || words[..8] != *MAGIC || words[8] != VERSION || words[9] > 1 || words[11] != 0 {
        return None;
    }
    let token = words[20..36].try_into().ok()?;
    Some(Said { keyed: words[9] == 1, kind: Purpose::of(words[10])?, from: number(12)?, to: number(16)?, token })
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::peers::key::PeerKey;
    use proptest::prelude::*;

    const TOKEN: [u8; 16] = [7; 16];

    /// A rank of one load.
    fn rank(rank: u32, secret: Option<&str>) -> Pass {
        let key = secret.map(|secret| PeerKey::new(secret.as_bytes(), "a test").unwrap());
        Pass { rank, token: TOKEN, key }
    }

    const OURS: Option<&str> = Some("the key of all ranks");
    const THEIRS: Option<&str> = Some("the key of other ranks");

    /// Both ends, and what each has sent: words of the caller, answer, proof of the caller.
    struct Seen {
        outcome: (HandshakeStep, HandshakeStep),
        sent: [Vec<u8>; 3],
    }

    /// A handshake of two ranks that hear each other.
    fn met(caller: &Pass, called: &Pass, kind: Purpose) -> Seen {
        let (mut calls, hello) = Handshake::call(caller, called.rank, kind).unwrap();
        let mut answers = Handshake::answer();
        assert_eq!(answers.awaits(called), hello.len());
        let first = answers.hear(called, &hello).unwrap();
        let answer = match &first {
            HandshakeStep::Say(answer) | HandshakeStep::Met(_, _, answer) => answer.clone(),
            _ => Vec::new(),
        };
        let second = calls.hear(caller, &answer).unwrap();
        let mut sent = [hello, answer, Vec::new()];
        let last = match &second {
            HandshakeStep::Met(_, _, proof) if matches!(first, HandshakeStep::Say(_)) => {
                sent[2].clone_from(proof);
                answers.hear(called, proof).unwrap()
            }
            _ => first,
        };
        Seen { outcome: (second, last), sent }
    }

    #[test]
    fn ranks_with_one_key_and_ranks_without_any_meet() {
        for secret in [OURS, None] {
            for kind in [Purpose::Data, Purpose::Control, Purpose::Standing] {
                let Seen { outcome, .. } = met(&rank(3, secret), &rank(1, secret), kind);
                assert!(matches!(outcome.0, HandshakeStep::Met(1, k, _) if k == kind), "{outcome:?}");
                assert!(matches!(outcome.1, HandshakeStep::Met(3, k, _) if k == kind), "{outcome:?}");
            }
        }
    }

    #[test]
    fn the_caller_names_a_key_that_differs() {
        for (mine, theirs, why) in [
            (OURS, THEIRS, Rejection::Differs),
            (OURS, None, Rejection::OnlyOne(false)),
            (None, OURS, Rejection::OnlyOne(true)),
        ] {
            let Seen { outcome, .. } = met(&rank(1, mine), &rank(0, theirs), Purpose::Data);
            assert_eq!(outcome.0, HandshakeStep::Refused(why));
            assert!(why.text().starts_with("PENSTOCK_PEER_KEY differs") && why.is_of_key());
            assert!(!matches!(outcome.1, HandshakeStep::Met(..)), "the other end does not take it for a rank");
        }
    }

    #[test]
    fn a_caller_with_another_key_is_not_believed() {
        // It goes on, though it cannot check the answer.
        let (caller, called) = (rank(1, THEIRS), rank(0, OURS));
        let (_, hello) = Handshake::call(&caller, 0, Purpose::Data).unwrap();
        let mut answers = Handshake::answer();
        let HandshakeStep::Say(answer) = answers.hear(&called, &hello).unwrap() else { panic!("no answer") };
        let proof = caller.key.unwrap().code(CALLS, &[&hello, &answer[..WORDS]]);
        assert_eq!(answers.hear(&called, &proof).unwrap(), HandshakeStep::Refused(Rejection::Differs));
    }

    #[test]
    fn what_was_said_on_one_connection_is_worth_nothing_on_another() {
        let (caller, called) = (rank(1, OURS), rank(0, OURS));
        let Seen { sent: [hello, answer, proof], .. } = met(&caller, &called, Purpose::Data);
        // Someone says the caller's words again
        let mut again = Handshake::answer();
        let HandshakeStep::Say(other) = again.hear(&called, &hello).unwrap() else { panic!("no answer") };
        assert_ne!(other, answer);
        assert_eq!(again.hear(&called, &proof).unwrap(), HandshakeStep::Refused(Rejection::Differs));
        // Someone gives the called rank's answer again
        let (mut calls, _) = Handshake::call(&caller, 0, Purpose::Data).unwrap();
        assert_eq!(calls.hear(&caller, &answer).unwrap(), HandshakeStep::Refused(Rejection::Differs));
    }

    #[test]
    fn a_rank_does_not_take_its_own_words_for_those_of_another() {
        let me = rank(1, OURS);
        // Its call comes back as a call, and as an answer.
        let (mut calls, hello) = Handshake::call(&me, 0, Purpose::Data).unwrap();
        assert_eq!(Handshake::answer().hear(&me, &hello).unwrap(), HandshakeStep::Refused(Rejection::Other));
        let echo: Vec<u8> = hello.iter().copied().chain([0; CODE]).collect();
        assert_eq!(calls.hear(&me, &echo).unwrap(), HandshakeStep::Refused(Rejection::Other));
        // A rank that is called proves itself to whoever calls. The caller's proof is not to be had in that way: rank 1, which
        // calls rank 0, is called with the words that rank 0 has answered.
        let zero = rank(0, OURS);
        let (_, hello) = Handshake::call(&me, 0, Purpose::Data).unwrap();
        let mut answers = Handshake::answer();
        let HandshakeStep::Say(answer) = answers.hear(&zero, &hello).unwrap() else { panic!("no answer") };
        let HandshakeStep::Say(oracle) = Handshake::answer().hear(&me, &answer[..WORDS]).unwrap() else {
            panic!("no answer")
        };
        assert_eq!(answers.hear(&zero, &oracle[WORDS..]).unwrap(), HandshakeStep::Refused(Rejection::Differs));
    }

    #[test]
    fn a_proof_is_for_one_load_one_pair_of_ranks_and_one_connection() {
        let (caller, called) = (rank(1, OURS), rank(0, OURS));
        let other_load = Pass { token: [8; 16], ..rank(0, OURS) };
        for (other, kind) in [(other_load, Purpose::Data), (rank(2, OURS), Purpose::Data)] {
            let (_, hello) = Handshake::call(&caller, 0, kind).unwrap();
            assert_eq!(Handshake::answer().hear(&other, &hello).unwrap(), HandshakeStep::Refused(Rejection::Other));
        }
        // Any word that is changed on the way is noticed by one end or the other, and neither takes it.
        for byte in 0..WORDS {
            let (mut calls, mut hello) = Handshake::call(&caller, 0, Purpose::Data).unwrap();
            hello[byte] ^= 1;
            match Handshake::answer().hear(&called, &hello).unwrap() {
                HandshakeStep::Refused(_) => {}
                HandshakeStep::Say(answer) => {
                    let heard = calls.hear(&caller, &answer).unwrap();
                    assert!(matches!(heard, HandshakeStep::Refused(_)), "byte {byte}: {heard:?}");
                }
                other => panic!("byte {byte}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_message_that_comes_in_parts_is_heard_and_one_that_stops_is_not() {
        let (caller, called) = (rank(1, OURS), rank(0, OURS));
        let Seen { sent, .. } = met(&caller, &called, Purpose::Data);
        for cut in 0..WORDS {
            let mut answers = Handshake::answer();
            assert!(answers.is_silent());
            assert_eq!(answers.hear(&called, &sent[0][..cut]).unwrap(), HandshakeStep::More);
            assert_eq!((answers.awaits(&called), answers.is_silent()), (WORDS - cut, cut == 0));
            assert!(matches!(answers.hear(&called, &sent[0][cut..]).unwrap(), HandshakeStep::Say(_)), "{cut}");
        }
        for cut in 0..WORDS + CODE {
            let (mut calls, _) = Handshake::call(&caller, 0, Purpose::Data).unwrap();
            assert_eq!(calls.hear(&caller, &sent[1][..cut]).unwrap(), HandshakeStep::More, "{cut}");
        }
    }

    proptest! {
        /// Nobody gets in, and nothing panics, whatever is said.
        #[test]
        fn no_other_bytes_are_believed(parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..8), knows in any::<bool>()) {
            let me = rank(0, OURS);
            let mut answers = Handshake::answer();
            if knows {
                // As far as anybody gets who has heard the name of the load.
                let (_, hello) = Handshake::call(&rank(1, THEIRS), 0, Purpose::Data).unwrap();
                prop_assert!(matches!(answers.hear(&me, &hello).unwrap(), HandshakeStep::Say(_)));
            }
            for part in parts {
                match answers.hear(&me, &part).unwrap() {
                    HandshakeStep::More => {}
                    HandshakeStep::Refused(_) => break,
                    other => prop_assert!(false, "{other:?}"),
                }
            }
        }
    }
}
