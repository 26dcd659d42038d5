//! Frames over a TCP connection: a little-endian `u32` length, then that many bytes of postcard.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::Message;

/// Maximum frame size. A larger length is a protocol error.
pub(super) const MAX_FRAME_BYTES: usize = 1 << 22;
/// Maximum size of the first frame of a connection, whose sender is not known yet.
pub(super) const MAX_HELLO_BYTES: usize = 64;
/// Time limit of a write. Messages are small, so a peer that reads nothing for this long counts as lost.
const WRITE_LIMIT: Duration = Duration::from_secs(10);
/// Bytes per read.
const CHUNK_BYTES: usize = 1 << 14;

/// Prepares a connection for small messages.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_LIMIT))
}

fn protocol_error(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// Encodes `message` as a frame, with its length.
pub(super) fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    frame = postcard::to_extend(message, frame).map_err(|e| protocol_error(e.to_string()))?;
    let len = frame.len() - 4;
    if len > MAX_FRAME_BYTES {
        return Err(protocol_error(format!("a frame of {len} bytes exceeds the maximum of {MAX_FRAME_BYTES}")));
    }
    frame[..4].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(frame)
}

/// Decodes the message of a frame, which is passed without its length.
pub(super) fn decode<T: DeserializeOwned>(frame: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(frame) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(protocol_error(format!("{} bytes follow the message in its frame", rest.len()))),
        Err(error) => Err(protocol_error(format!("a frame of {} bytes cannot be decoded: {error}", frame.len()))),
    }
}

/// Removes the first frame, of at most `max_bytes`, from `bytes` and returns it without its length; `None` while it is
/// incomplete.
pub(super) fn take_frame(bytes: &mut Vec<u8>, max_bytes: usize) -> io::Result<Option<Vec<u8>>> {
    let Some(len) = bytes.first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_le_bytes(*len) as usize;
    if len > max_bytes {
        return Err(protocol_error(format!("a frame of {len} bytes exceeds the maximum of {max_bytes}")));
    }
    let Some(frame) = bytes.get(4..4 + len) else { return Ok(None) };
    let frame = frame.to_vec();
    bytes.drain(..4 + len);
    Ok(Some(frame))
}

pub(super) fn send<T: Serialize>(mut stream: &TcpStream, messages: &[T]) -> io::Result<()> {
    let frames = messages.iter().map(encode).collect::<io::Result<Vec<_>>>()?;
    stream.write_all(&frames.concat())
}

/// The receiving side of a connection.
#[derive(Debug)]
pub(super) struct Incoming {
    stream: TcpStream,
    /// Received bytes of incomplete frames.
    bytes: Vec<u8>,
    max_frame_bytes: usize,
}

impl Incoming {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, bytes: Vec::new(), max_frame_bytes: MAX_FRAME_BYTES }
    }

    /// The receiving side of a connection from an unknown peer, which may send a small frame only.
    pub(super) fn from_stranger(stream: TcpStream) -> Self {
        Self { max_frame_bytes: MAX_HELLO_BYTES, ..Self::new(stream) }
    }

    /// The peer is a rank: accepts frames of all sizes.
    pub(super) fn into_known(self) -> Self {
        Self { max_frame_bytes: MAX_FRAME_BYTES, ..self }
    }

    /// Receives the next message; `None` if none arrives within `wait`.
    ///
    /// # Errors
    /// The connection ended, or the peer violated the protocol.
    pub(super) fn next(&mut self, wait: Duration) -> io::Result<Option<Message>> {
        self.next_frame(wait)?.map(|frame| decode(&frame)).transpose()
    }

    /// Like [`next`](Self::next), for a frame without its length.
    pub(super) fn next_frame(&mut self, wait: Duration) -> io::Result<Option<Vec<u8>>> {
        if let Some(frame) = take_frame(&mut self.bytes, self.max_frame_bytes)? {
            return Ok(Some(frame));
        }
        // `set_read_timeout` rejects 0.
        self.stream.set_read_timeout(Some(wait.max(Duration::from_millis(1))))?;
        let mut chunk = [0; CHUNK_BYTES];
        match self.stream.read(&mut chunk) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed the connection")),
            Ok(n) => self.bytes.extend(&chunk[..n]),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => {}
                _ => return Err(error),
            },
        }
        take_frame(&mut self.bytes, self.max_frame_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::MeetingEntry;
    use super::*;

    #[test]
    fn frames_arrive_in_any_pieces() {
        let messages = [Message::Alive, Message::Welcome { id: vec![7; 300] }, Message::Goodbye];
        let (mut received, mut buffer) = (Vec::new(), Vec::new());
        for byte in messages.iter().flat_map(|message| encode(message).unwrap()) {
            buffer.push(byte);
            received.extend(
                take_frame(&mut buffer, MAX_FRAME_BYTES).unwrap().map(|frame| decode::<Message>(&frame).unwrap()),
            );
        }
        assert_eq!(received, messages);
        assert!(buffer.is_empty());
    }

    #[test]
    fn oversized_length_is_a_protocol_error() {
        for len in [MAX_FRAME_BYTES as u32 + 1, u32::MAX, u32::from_le_bytes(*b"GET ")] {
            let error = take_frame(&mut len.to_le_bytes().to_vec(), MAX_FRAME_BYTES).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        let largest = (MAX_FRAME_BYTES as u32).to_le_bytes();
        assert!(take_frame(&mut largest.to_vec(), MAX_FRAME_BYTES).unwrap().is_none());
        assert!(take_frame(&mut largest.to_vec(), MAX_HELLO_BYTES).is_err());
        assert!(encode(&Message::Welcome { id: vec![0; MAX_FRAME_BYTES] }).is_err());
    }

    /// A sequence whose count exceeds its frame's bytes is an error.
    #[test]
    fn oversized_sequence_is_a_protocol_error() {
        let entries = vec![MeetingEntry::Registration(None)];
        let message = Message::Met { context: 0, number: 0, first: 0, entries };
        let mut frame = encode(&message).unwrap().split_off(4);
        // The last three bytes are the count of entries, 1, and the entry.
        frame.truncate(frame.len() - 3);
        frame.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
        assert!(decode::<Message>(&frame).is_err());
    }
}
