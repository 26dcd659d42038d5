//! Frames: a little-endian `u32` length, then that many bytes: postcard, or a frame of the
//! handshake.

use std::io;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum frame size. A larger length is a protocol error.
pub(crate) const MAX_FRAME_BYTES: usize = 1 << 20;
/// A length before each frame.
pub(super) const LENGTH_BYTES: usize = 4;

pub(super) fn protocol_error(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

/// Encodes `message` as a frame, with its length.
pub(crate) fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    let bytes = postcard::to_extend(message, vec![0; LENGTH_BYTES])
        .map_err(|e| protocol_error(e.to_string()))?;
    with_length(bytes)
}

/// A frame with these contents, with its length.
pub(crate) fn frame(contents: &[u8]) -> io::Result<Vec<u8>> {
    with_length([&[0; LENGTH_BYTES], contents].concat())
}

/// Writes the length of a frame into its first bytes.
pub(super) fn with_length(mut frame: Vec<u8>) -> io::Result<Vec<u8>> {
    let len = frame.len() - LENGTH_BYTES;
    if len > MAX_FRAME_BYTES {
        return Err(protocol_error(format!(
            "a frame of {len} bytes exceeds the maximum of {MAX_FRAME_BYTES}"
        )));
    }
    frame[..LENGTH_BYTES].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(frame)
}

/// Decodes the message of a frame, which is passed without its length.
pub(crate) fn decode<T: DeserializeOwned>(frame: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(frame) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(protocol_error(format!(
            "{} bytes follow the message in its frame",
            rest.len()
        ))),
        Err(error) => Err(protocol_error(format!(
            "a frame of {} bytes cannot be decoded: {error}",
            frame.len()
        ))),
    }
}

/// The number of bytes of the first frame of `bytes`, with its length; `None` while it is
/// incomplete.
pub(super) fn frame_len(bytes: &[u8], max_bytes: usize) -> io::Result<Option<usize>> {
    let Some(len) = bytes.first_chunk() else {
        return Ok(None);
    };
    let len = u32::from_le_bytes(*len) as usize;
    if len > max_bytes {
        return Err(protocol_error(format!(
            "a frame of {len} bytes exceeds the maximum of {max_bytes}"
        )));
    }
    Ok(Some(LENGTH_BYTES + len).filter(|&end| end <= bytes.len()))
}
