//! The messages between ranks: a record of fixed length from every rank to rank 0, and one message
//! to all ranks.
//!
//! This crate has no network: the caller's communicator carries them. Their sizes depend neither on
//! the model nor, for all ranks but rank 0, on the number of ranks.

use std::convert::Infallible;
use std::fmt::Display;

use serde::{Deserialize, Serialize};

use crate::CkptError;
use crate::format::manifest::short;

/// The length of a record of [`Exchange::gather`].
pub const RECORD_BYTES: usize = 64;

/// The length of a message of [`Exchange::broadcast`].
pub const MESSAGE_BYTES: usize = 4096;

/// Maximum characters of an error in a message; each takes at most 6 bytes in JSON.
const MAX_ERROR_CHARS: usize = 600;

/// The exchange between the ranks, over the caller's communicator. All ranks make the same calls in
/// the same order.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not exchange messages between ranks",
    note = "wrap a function, such as `Communicator::exchange` of zero-comm, in zero_ckpt::ExchangeFn; SingleRank is for one rank"
)]
pub trait Exchange {
    /// A failure of the communicator.
    type Error: Display;

    /// Sends this rank's record of [`RECORD_BYTES`] bytes to rank 0. On rank 0 returns the records
    /// of all ranks, concatenated in rank order; what the other ranks return is ignored. A gather
    /// to rank 0 moves the least; an all-gather is correct too.
    ///
    /// # Errors
    /// The communicator failed.
    fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, Self::Error>;

    /// Replaces `message`, of [`MESSAGE_BYTES`] bytes, with that of rank `root`.
    ///
    /// # Errors
    /// The communicator failed.
    fn broadcast(&mut self, message: &mut [u8], root: u64) -> Result<(), Self::Error>;
}

/// The [`Exchange`] of a run with one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleRank;

impl Exchange for SingleRank {
    type Error = Infallible;

    fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, Infallible> {
        Ok(record.to_vec())
    }

    fn broadcast(&mut self, _: &mut [u8], _: u64) -> Result<(), Infallible> {
        Ok(())
    }
}

/// The [`Exchange`] by a function that sends a message to all ranks and returns the messages of all
/// ranks, in rank order, such as `Communicator::exchange` of zero-comm.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeFn<F> {
    rank: u64,
    exchange: F,
}

impl<F> ExchangeFn<F> {
    /// The exchange of rank `rank`.
    pub const fn new(rank: u64, exchange: F) -> Self {
        Self { rank, exchange }
    }
}

impl<F, E> Exchange for ExchangeFn<F>
where
    F: FnMut(&[u8]) -> Result<Vec<Vec<u8>>, E>,
    E: Display,
{
    type Error = E;

    fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, E> {
        Ok((self.exchange)(record)?.concat())
    }

    fn broadcast(&mut self, message: &mut [u8], root: u64) -> Result<(), E> {
        let own: &[u8] = if self.rank == root { &*message } else { &[] };
        let all = (self.exchange)(own)?;
        let sent = usize::try_from(root).ok().and_then(|root| all.get(root));
        match sent.filter(|sent| sent.len() == message.len()) {
            Some(sent) => message.copy_from_slice(sent),
            // No JSON: the caller reports it.
            None => message.fill(0),
        }
        Ok(())
    }
}

/// A message from one rank to all.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Message<T> {
    /// The result.
    Done(T),
    /// The error of the sender.
    Error(String),
    /// The sender does not see the directory of rank 0; the two directories.
    NotShared(String),
    /// This rank failed and broadcasts its error next.
    Failed(u64),
    /// There is no result yet; another message follows.
    Pending,
    /// A rank is not ready yet: all ranks gather their records again, and another message follows.
    Gather,
}

impl<T> Message<T> {
    pub(crate) fn error(error: &impl Display) -> Self {
        Self::Error(shorten(&error.to_string()))
    }
}

/// Broadcasts `message`, which only counts on rank `root`, and returns that of `root`.
pub(crate) fn broadcast<T: Serialize + for<'de> Deserialize<'de>>(
    message: &Message<T>,
    root: u64,
    exchange: &mut impl Exchange,
) -> Result<Message<T>, CkptError> {
    let mut bytes = encode(message)?;
    exchange
        .broadcast(&mut bytes, root)
        .map_err(|e| CkptError::Exchange {
            message: e.to_string(),
        })?;
    serde_json::from_slice(&bytes).map_err(|e| CkptError::BadFrame {
        rank: root,
        why: short(&e.to_string()),
    })
}

/// JSON, padded with spaces to [`MESSAGE_BYTES`].
fn encode<T: Serialize>(message: &Message<T>) -> Result<Vec<u8>, CkptError> {
    let mut bytes = serde_json::to_vec(message).map_err(|e| CkptError::Exchange {
        message: format!("invalid message: {e}"),
    })?;
    if bytes.len() > MESSAGE_BYTES {
        return Err(CkptError::argument(
            "bytes of a message",
            format!("at most {MESSAGE_BYTES}"),
            bytes.len(),
        ));
    }
    bytes.resize(MESSAGE_BYTES, b' ');
    Ok(bytes)
}

/// Shortens a message; keeps its start (the action) and its end (the cause).
pub(crate) fn shorten(message: &str) -> String {
    let chars: Vec<char> = message.chars().collect();
    if chars.len() <= MAX_ERROR_CHARS {
        return message.into();
    }
    let half = MAX_ERROR_CHARS / 2;
    let head = &chars[..half];
    let tail = &chars[chars.len() - half + 5..];
    format!(
        "{} ... {}",
        head.iter().collect::<String>(),
        tail.iter().collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_gather_and_broadcast() {
        let mut one = ExchangeFn::new(1, |own: &[u8]| {
            Ok::<_, String>(vec![b"root".to_vec(), own.to_vec()])
        });
        assert_eq!(one.gather(b"mine").unwrap(), b"rootmine");
        let mut message = *b"1234";
        one.broadcast(&mut message, 0).unwrap();
        assert_eq!(&message, b"root");
        one.broadcast(&mut message, 1).unwrap();
        assert_eq!(&message, b"root");
        one.broadcast(&mut message, 2).unwrap();
        assert_eq!(message, [0; 4]);
    }

    #[test]
    fn any_error_fits_a_message() {
        for text in [
            "\u{1}".repeat(5000),
            "\u{10ffff}".repeat(5000),
            format!("a{}z", "\"\n".repeat(5000)),
        ] {
            let Message::Error(read) = broadcast(&Message::<()>::error(&text), 0, &mut SingleRank)
                .expect("the message fits")
            else {
                panic!("another message")
            };
            assert!(
                read.contains(" ... ") && read.chars().count() == MAX_ERROR_CHARS,
                "{read}"
            );
            assert_eq!(
                (read.chars().next(), read.chars().last()),
                (text.chars().next(), text.chars().last())
            );
        }
    }

    #[test]
    fn malformed_message_names_its_sender() {
        struct Noise;
        impl Exchange for Noise {
            type Error = String;
            fn gather(&mut self, _: &[u8]) -> Result<Vec<u8>, String> {
                Err("not used".into())
            }
            fn broadcast(&mut self, message: &mut [u8], _: u64) -> Result<(), String> {
                message.fill(7);
                Ok(())
            }
        }
        let error = broadcast(&Message::<()>::Pending, 3, &mut Noise).unwrap_err();
        assert!(
            matches!(error, CkptError::BadFrame { rank: 3, .. }),
            "{error}"
        );
    }
}
