//! The handshake: a rank and the coordinator prove to each other that they know the job's token.
//! The token itself never crosses the network.
//!
//! | frame | from | content |
//! |---|---|---|
//! | hello | rank | magic, version, rank, world size, NCCL's version, nonce, MAC |
//! | challenge | coordinator | nonce, MAC over the hello and this nonce |
//! | proof | rank | MAC over the hello and the coordinator's nonce |
//!
//! Numbers are little-endian `u32`. A MAC is HMAC-SHA-256 under the token, truncated to 16 bytes. A
//! recorded hello is useless, because its sender cannot answer the new nonce. Later frames are
//! neither encrypted nor authenticated one by one, like NCCL's own data: the token keeps out other
//! programs and jobs, not someone who alters packets.
//!
//! Why: without it, whoever reached rank 0's port could join as a rank and receive NCCL's unique
//! id, or end the rendezvous with one packet; and a program that listens in rank 0's place could
//! pass for it.

use hmac::{Hmac, Mac as _};
use sha2::Sha256;

use super::ranks::Token;

/// Protocol version. The coordinator refuses ranks of another version.
pub(crate) const VERSION: u32 = 7;
/// Maximum size of a frame of the handshake.
pub(crate) const MAX_HELLO_BYTES: usize = 64;
/// Handshake magic; rejects unrelated connections.
const MAGIC: [u8; 8] = *b"zero-rs\0";
const NONCE_BYTES: usize = 16;
const MAC_BYTES: usize = 16;

/// The claims of a rank in its first frame.
///
/// In all versions, the frame begins with magic, version and rank and ends with its MAC, and the
/// other frames of the handshake keep their layout, so that the coordinator can name a rank of
/// another version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) version: u32,
    pub(crate) rank: usize,
    /// 0 if the version is another.
    pub(crate) world_size: usize,
    /// NCCL's version; 0 if the version of the protocol is another.
    pub(crate) library: u64,
}

impl Hello {
    pub(crate) fn new(rank: usize, world_size: usize, library: u64) -> Self {
        Self {
            version: VERSION,
            rank,
            world_size,
            library,
        }
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let numbers = body.strip_prefix(&MAGIC)?;
        let number = |index: usize| {
            Some(u32::from_le_bytes(
                *numbers.get(index * 4..)?.first_chunk()?,
            ))
        };

        let version = number(0)?;
        let rank = number(1)? as usize;
        if version != VERSION {
            return Some(Self {
                version,
                rank,
                world_size: 0,
                library: 0,
            });
        }

        let hello = Self {
            version,
            rank,
            world_size: number(2)? as usize,
            library: u64::from(number(3)?),
        };

        (numbers.len() == 16 + NONCE_BYTES).then_some(hello)
    }
}

/// Returns random bytes.
fn nonce() -> std::io::Result<[u8; NONCE_BYTES]> {
    let mut nonce = [0; NONCE_BYTES];
    getrandom::fill(&mut nonce).map_err(std::io::Error::other)?;
    Ok(nonce)
}

/// The key of a job's MACs.
#[derive(Clone)]
pub(crate) struct Key(Hmac<Sha256>);

impl Key {
    /// The key of `token`; the empty key without one.
    pub(crate) fn new(token: Option<&Token>) -> Self {
        let secret = token.map_or(&[][..], Token::secret);
        Self(Hmac::new_from_slice(secret).expect("HMAC accepts keys of all lengths"))
    }

    /// The MAC of `parts` in the frame `purpose`.
    fn mac(&self, purpose: &str, parts: &[&[u8]]) -> Expected {
        let mut mac = self.0.clone();
        mac.update(purpose.as_bytes());
        parts.iter().for_each(|part| mac.update(part));
        Expected(mac)
    }

    /// The first frame of a rank.
    pub(crate) fn hello(&self, hello: &Hello) -> std::io::Result<Vec<u8>> {
        let mut frame = MAGIC.to_vec();
        for number in [
            hello.version,
            hello.rank as u32,
            hello.world_size as u32,
            hello.library as u32,
        ] {
            frame.extend(number.to_le_bytes());
        }
        frame.extend(nonce()?);
        Ok(self.sign(&frame))
    }

    /// A hello with this body.
    pub(crate) fn sign(&self, body: &[u8]) -> Vec<u8> {
        [body, &self.mac("hello", &[body]).bytes()].concat()
    }

    /// Decodes a rank's first frame; `None` if the sender does not know the token.
    pub(crate) fn check_hello(&self, frame: &[u8]) -> Option<Hello> {
        let (body, mac) = frame.split_last_chunk::<MAC_BYTES>()?;
        self.mac("hello", &[body])
            .matches(mac)
            .then(|| Hello::decode(body))
            .flatten()
    }

    /// The coordinator's answer to a hello frame, and the proof that it expects.
    pub(crate) fn challenge(&self, hello: &[u8]) -> std::io::Result<(Vec<u8>, Expected)> {
        let mut frame = nonce()?.to_vec();
        let expected = self.mac("proof", &[hello, &frame]);
        let mac = self.mac("challenge", &[hello, &frame]).bytes();
        frame.extend(mac);
        Ok((frame, expected))
    }

    /// A rank's answer to a challenge; `None` if the sender does not know the token.
    pub(crate) fn answer(&self, hello: &[u8], challenge: &[u8]) -> Option<Vec<u8>> {
        let (nonce, mac) = challenge.split_last_chunk::<MAC_BYTES>()?;
        let genuine =
            nonce.len() == NONCE_BYTES && self.mac("challenge", &[hello, nonce]).matches(mac);
        genuine.then(|| self.mac("proof", &[hello, nonce]).bytes().to_vec())
    }
}

/// A MAC that a peer must send.
pub(crate) struct Expected(Hmac<Sha256>);

impl Expected {
    fn bytes(self) -> [u8; MAC_BYTES] {
        *self
            .0
            .finalize()
            .into_bytes()
            .first_chunk()
            .expect("SHA-256 has 32 bytes")
    }

    /// Compares in constant time.
    pub(crate) fn matches(self, mac: &[u8]) -> bool {
        mac.len() == MAC_BYTES && self.0.verify_truncated_left(mac).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(secret: &str) -> Key {
        Key::new(Some(&Token::new(secret).unwrap()))
    }

    const SECRET: &str = "0123456789abcdef";

    #[test]
    fn both_sides_prove_the_token() {
        let (key, other, open) = (key(SECRET), key("0123456789abcdeg"), Key::new(None));
        let hello = Hello::new(3, 4, 23_007);
        let frame = key.hello(&hello).unwrap();
        assert!(frame.len() <= MAX_HELLO_BYTES);
        assert_eq!(key.check_hello(&frame), Some(hello));
        assert!(other.check_hello(&frame).is_none() && open.check_hello(&frame).is_none());
        let (challenge, expected) = key.challenge(&frame).unwrap();
        let proof = key.answer(&frame, &challenge).unwrap();
        assert!(expected.matches(&proof));
        assert!(
            other.answer(&frame, &challenge).is_none() && open.answer(&frame, &challenge).is_none()
        );
        // Neither frame of the coordinator is a proof, nor is a recorded or a shortened one.
        let (again, expected) = key.challenge(&frame).unwrap();
        assert!(!expected.matches(&proof));
        for wrong in [&again[..16], &again[16..], &frame[40..], &[]] {
            assert!(!key.challenge(&frame).unwrap().1.matches(wrong));
        }
        let (challenge, expected) = key.challenge(&frame).unwrap();
        assert!(!expected.matches(&key.answer(&frame, &challenge).unwrap()[..15]));
    }

    #[test]
    fn another_version_is_recognized() {
        let key = key(SECRET);
        let hello = Hello {
            version: VERSION + 1,
            ..Hello::new(3, 4, 23_007)
        };
        let expected = Hello {
            world_size: 0,
            library: 0,
            ..hello
        };
        assert_eq!(key.check_hello(&key.hello(&hello).unwrap()), Some(expected));
        let mut body = [
            &MAGIC[..],
            &(VERSION + 1).to_le_bytes(),
            &3u32.to_le_bytes(),
            &[7; 3],
        ]
        .concat();
        body.extend(key.mac("hello", &[&body]).bytes());
        assert_eq!(key.check_hello(&body), Some(expected));
    }

    proptest! {
        #[test]
        fn damaged_frames_are_rejected(at in any::<prop::sample::Index>(), change in 1u8.., cut in any::<prop::sample::Index>()) {
            let key = key(SECRET);
            let hello = key.hello(&Hello::new(3, 4, 23_007)).unwrap();
            let (challenge, _) = key.challenge(&hello).unwrap();
            let damage = |frame: &[u8]| {
                let mut frame = frame.to_vec();
                *at.get_mut(&mut frame) ^= change;
                frame
            };
            prop_assert!(key.check_hello(&damage(&hello)).is_none());
            prop_assert!(key.check_hello(&hello[..cut.index(hello.len())]).is_none());
            prop_assert!(key.answer(&hello, &damage(&challenge)).is_none());
            prop_assert!(key.answer(&hello, &challenge[..cut.index(challenge.len())]).is_none());
        }
    }
}
