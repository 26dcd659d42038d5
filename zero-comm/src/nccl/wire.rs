//! Messages over a TCP connection.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::message::{MAX_BYTES, Message};

/// How long a write may take: messages are small, so a peer that takes nothing for so long is gone.
const WRITE_LIMIT: Duration = Duration::from_secs(10);
/// Bytes read at once.
const CHUNK_BYTES: usize = 1 << 14;

/// Prepares a connection for small messages.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(WRITE_LIMIT))
}

pub(super) fn send(mut stream: &TcpStream, messages: &[Message]) -> io::Result<()> {
    let bytes: Vec<u8> = messages.iter().flat_map(Message::encode).collect();
    stream.write_all(&bytes)
}

/// The receiving side of a connection.
#[derive(Debug)]
pub(super) struct Incoming {
    stream: TcpStream,
    bytes: Vec<u8>,
}

impl Incoming {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, bytes: Vec::new() }
    }

    /// The next message, if one comes within `wait`.
    ///
    /// # Errors
    /// The connection has ended, or what came is no message.
    pub(super) fn next(&mut self, wait: Duration) -> io::Result<Option<Message>> {
        if let Some(message) = self.take()? {
            return Ok(Some(message));
        }
        // A wait of 0 would be one without an end.
        self.stream.set_read_timeout(Some(wait.max(Duration::from_millis(1))))?;
        let mut chunk = [0; CHUNK_BYTES];
        match self.stream.read(&mut chunk) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the connection ended")),
            Ok(n) => self.bytes.extend(&chunk[..n]),
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted => {}
                _ => return Err(error),
            },
        }
        self.take()
    }

    fn take(&mut self) -> io::Result<Option<Message>> {
        let Some(len) = self.bytes.first_chunk::<4>() else { return Ok(None) };
        let end = 4 + u32::from_le_bytes(*len) as usize;
        let none = || io::Error::new(io::ErrorKind::InvalidData, "what came is no message of ours");
        if end > MAX_BYTES {
            return Err(none());
        }
        let Some(frame) = self.bytes.get(4..end) else { return Ok(None) };
        let message = Message::decode(frame).ok_or_else(none)?;
        self.bytes.drain(..end);
        Ok(Some(message))
    }
}
