//! Frames over a TCP connection. [`Input`] and [`Output`] are the buffers of a non-blocking
//! connection, [`Incoming`] and [`send`] block.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use serde::Serialize;

use super::frames::{LENGTH_BYTES, MAX_FRAME_BYTES, decode, encode, frame_len};
use super::message::Message;

/// Maximum of bytes that wait to be sent over one non-blocking connection: a peer that leaves more
/// unread is too slow.
pub(crate) const MAX_OUTPUT_BYTES: usize = 2 * MAX_FRAME_BYTES;
/// Time limit without progress of a write. A peer that reads nothing for this long counts as lost.
pub(crate) const WRITE_LIMIT: Duration = Duration::from_secs(10);
/// Bytes per read.
const CHUNK_BYTES: usize = 1 << 12;
/// Prepares a connection for small messages.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_LIMIT))
}

/// Received bytes, cut into frames.
#[derive(Debug, Default)]
pub(crate) struct Input {
    bytes: Vec<u8>,
    /// Bytes of frames that were returned.
    returned: usize,
    /// The last read received fewer bytes than its buffer has.
    drained: bool,
}

impl Input {
    /// Whether the last read received all that had arrived.
    pub(crate) fn is_drained(&self) -> bool {
        self.drained
    }

    /// Reads once from `source`, at most what a frame of `max_frame_bytes` needs and 4 KiB. Returns
    /// whether it received bytes; `false` if none are available now.
    ///
    /// # Errors
    /// The connection ended.
    pub(crate) fn read_from(
        &mut self,
        source: &mut impl Read,
        max_frame_bytes: usize,
    ) -> io::Result<bool> {
        self.bytes.drain(..self.returned);
        self.returned = 0;
        if self.bytes.is_empty() {
            self.bytes.shrink_to(CHUNK_BYTES);
        }
        let mut chunk = [0; CHUNK_BYTES];
        self.drained = false;
        let most = (LENGTH_BYTES + max_frame_bytes)
            .saturating_sub(self.bytes.len())
            .clamp(1, CHUNK_BYTES);

        match source.read(&mut chunk[..most]) {
            Ok(0) => Err(io::Error::new(
                ErrorKind::UnexpectedEof,
                "the peer closed the connection",
            )),
            Ok(n) => {
                self.bytes.extend(&chunk[..n]);
                self.drained = n < most;
                Ok(true)
            }
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(false),
                ErrorKind::Interrupted => Ok(true),
                _ => Err(error),
            },
        }
    }

    /// Returns the next frame without its length; `None` while it is incomplete.
    ///
    /// # Errors
    /// The frame exceeds `max_frame_bytes`.
    pub(crate) fn next_frame(&mut self, max_frame_bytes: usize) -> io::Result<Option<&[u8]>> {
        let rest = &self.bytes[self.returned..];
        let Some(len) = frame_len(rest, max_frame_bytes)? else {
            return Ok(None);
        };
        self.returned += len;
        Ok(Some(&rest[LENGTH_BYTES..len]))
    }
}

/// Bytes that wait to be sent.
#[derive(Debug, Default)]
pub(crate) struct Output {
    bytes: Vec<u8>,
    /// Bytes that were sent.
    sent: usize,
}

impl Output {
    /// The number of bytes that wait.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends encoded frames.
    ///
    /// # Errors
    /// More than [`MAX_OUTPUT_BYTES`] would wait.
    pub(crate) fn append(&mut self, frames: &[u8]) -> io::Result<()> {
        if self.len() + frames.len() > MAX_OUTPUT_BYTES {
            return Err(io::Error::new(
                ErrorKind::TimedOut,
                format!("it left {} bytes unread", self.len()),
            ));
        }
        self.bytes.drain(..self.sent);
        self.sent = 0;
        self.bytes.extend(frames);
        Ok(())
    }

    /// Writes what `sink` accepts now; returns whether that was anything.
    ///
    /// # Errors
    /// The connection ended.
    pub(crate) fn write_to(&mut self, sink: &mut impl Write) -> io::Result<bool> {
        let before = self.sent;
        while !self.is_empty() {
            match sink.write(&self.bytes[self.sent..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => self.sent += n,
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => return Ok(self.sent > before),
                    ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
        let progress = self.sent > before;
        (self.bytes, self.sent) = (Vec::new(), 0);
        Ok(progress)
    }
}

/// Sends messages over a blocking connection.
///
/// # Errors
/// `InvalidData`: a message is too large, and nothing was sent. Otherwise the connection ended, or
/// the peer received nothing for [`WRITE_LIMIT`]; a part of a frame may have been sent, so that the
/// connection is of no further use.
pub(crate) fn send<T: Serialize>(mut stream: &TcpStream, messages: &[T]) -> io::Result<()> {
    let frames = messages
        .iter()
        .map(encode)
        .collect::<io::Result<Vec<_>>>()?;
    stream
        .write_all(&frames.concat())
        .map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => io::Error::new(
                ErrorKind::TimedOut,
                format!("it received nothing for {WRITE_LIMIT:?}"),
            ),
            _ => error,
        })
}

/// The receiving side of a blocking connection.
#[derive(Debug)]
pub(crate) struct Incoming {
    stream: TcpStream,
    input: Input,
}

impl AsFd for Incoming {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Incoming {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            input: Input::default(),
        }
    }

    /// Receives the next message; `None` if none arrives within `wait`.
    ///
    /// # Errors
    /// The connection ended, or the peer violated the protocol.
    pub(crate) fn next(&mut self, wait: Duration) -> io::Result<Option<Message>> {
        self.next_frame(wait, MAX_FRAME_BYTES)?
            .map(decode)
            .transpose()
    }

    /// Like [`next`](Self::next), for a frame of at most `max_bytes`, without its length.
    pub(crate) fn next_frame(
        &mut self,
        wait: Duration,
        max_bytes: usize,
    ) -> io::Result<Option<&[u8]>> {
        if frame_len(&self.input.bytes[self.input.returned..], max_bytes)?.is_none() {
            // `set_read_timeout` rejects 0.
            self.stream
                .set_read_timeout(Some(wait.max(Duration::from_millis(1))))?;
            self.input.read_from(&mut self.stream, max_bytes)?;
        }
        self.input.next_frame(max_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::frames::frame;
    use super::*;
    use crate::CommError;

    #[test]
    fn frames_arrive_in_any_pieces() {
        let messages = [
            Message::Alive,
            Message::Welcome {
                id: vec![7; 300],
                report_every: Duration::ZERO,
            },
            Message::Goodbye,
        ];

        let bytes: Vec<u8> = messages
            .iter()
            .flat_map(|message| encode(message).unwrap())
            .collect();

        for piece in 1..bytes.len() {
            let mut received = Vec::new();
            let mut input = Input::default();
            for mut piece in bytes.chunks(piece) {
                while !piece.is_empty() {
                    assert!(input.read_from(&mut piece, MAX_FRAME_BYTES).unwrap());
                }
                while let Some(frame) = input.next_frame(MAX_FRAME_BYTES).unwrap() {
                    received.push(decode::<Message>(frame).unwrap());
                }
            }
            assert_eq!(received, messages);
            assert_eq!(input.returned, input.bytes.len());
        }
    }

    #[test]
    fn oversized_length_is_a_protocol_error() {
        for len in [
            MAX_FRAME_BYTES as u32 + 1,
            u32::MAX,
            u32::from_le_bytes(*b"GET "),
        ] {
            let error = frame_len(&len.to_le_bytes(), MAX_FRAME_BYTES).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData);
        }
        let largest = (MAX_FRAME_BYTES as u32).to_le_bytes();
        assert!(frame_len(&largest, MAX_FRAME_BYTES).unwrap().is_none());
        assert!(frame_len(&largest, 64).is_err());
        assert!(
            encode(&Message::Welcome {
                id: vec![0; MAX_FRAME_BYTES],
                report_every: Duration::ZERO
            })
            .is_err()
        );
        assert!(frame(&[0; MAX_FRAME_BYTES + 1]).is_err());
    }

    /// A stranger cannot make the coordinator hold more than a frame of the handshake.
    #[test]
    fn input_is_bounded_by_the_frame() {
        let mut source = io::repeat(1);
        let mut input = Input::default();
        assert!(input.read_from(&mut source, 64).unwrap());
        assert_eq!(input.bytes.len(), 68);
        assert!(input.next_frame(64).is_err());
    }

    /// Accepts some bytes, then no more for now.
    struct Sink(usize, Vec<u8>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let n = bytes.len().min(self.0);
            self.0 -= n;
            self.1.extend(&bytes[..n]);
            if n == 0 {
                Err(ErrorKind::WouldBlock.into())
            } else {
                Ok(n)
            }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn output_is_bounded_and_in_order() {
        let mut output = Output::default();
        let mut sink = Sink(0, Vec::new());
        output.append(&[1; 10]).unwrap();
        assert!(!output.write_to(&mut sink).unwrap());
        sink.0 = 7;
        assert!(output.write_to(&mut sink).unwrap());
        output.append(&[2; 5]).unwrap();
        assert!(!output.write_to(&mut sink).unwrap());
        sink.0 = 100;
        assert!(output.write_to(&mut sink).unwrap() && output.is_empty());
        assert_eq!(sink.1, [[1; 10].to_vec(), [2; 5].to_vec()].concat());
        output.append(&vec![0; MAX_OUTPUT_BYTES]).unwrap();
        assert!(output.append(&[0]).is_err());
    }

    /// A sequence whose count exceeds its frame's bytes is an error.
    #[test]
    fn oversized_sequence_is_a_protocol_error() {
        let failed = Message::Failed {
            error: CommError::Aborted {
                rank: 0,
                reason: String::new(),
            },
        };
        let mut frame = encode(&failed).unwrap().split_off(LENGTH_BYTES);
        // The last byte is the length of the reason, 0.
        frame.pop();
        frame.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
        assert!(decode::<Message>(&frame).is_err());
    }
}
