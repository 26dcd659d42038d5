//! TFRecord: the frames of TensorBoard's event files, and the messages in them.
//!
//! A frame is the length of its data (u64), the masked CRC-32C of those 8 bytes, the data, and the
//! masked CRC-32C of the data, all little-endian
//! (<https://www.tensorflow.org/tutorials/load_data/tfrecord>). The data is an `Event` of
//! TensorFlow's `event.proto`, of which [`Event`] has the fields that this program writes.

use std::io::{self, Read};

use crc_fast::CrcAlgorithm;
use prost::Message;

/// The version of event files; TensorBoard drops the steps after a restart from version 2 on.
pub(crate) const FILE_VERSION: &str = "brain.Event:2";
/// Bytes before the data of a frame.
const HEAD_BYTES: usize = 12;
/// Bytes after it.
const TAIL_BYTES: usize = 4;
/// Maximum length of an event: far longer than any of this program.
const MAX_EVENT_BYTES: u64 = 16 << 20;

/// An event.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(crate) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(crate) step: i64,
    /// Only in the first event of a file.
    #[prost(string, optional, tag = "3")]
    pub(crate) file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub(crate) summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    pub(crate) session_log: Option<SessionLog>,
    /// Only in the first event of a file.
    #[prost(message, optional, tag = "10")]
    pub(crate) source_metadata: Option<SourceMetadata>,
}

/// Values of a step.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(crate) value: Vec<Value>,
}

/// A value.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Value {
    #[prost(string, tag = "1")]
    pub(crate) tag: String,
    #[prost(float, optional, tag = "2")]
    pub(crate) simple_value: Option<f32>,
}

/// A note about the session.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct SessionLog {
    /// [`SESSION_START`].
    #[prost(int32, tag = "1")]
    pub(crate) status: i32,
}

/// The status of a session that starts: events of earlier files at its step and later are void.
pub(crate) const SESSION_START: i32 = 1;

/// The program that wrote a file.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct SourceMetadata {
    #[prost(string, tag = "1")]
    pub(crate) writer: String,
}

/// The frame of an event.
pub(crate) fn frame(event: &Event) -> Vec<u8> {
    let data = event.encode_to_vec();
    let length = (data.len() as u64).to_le_bytes();
    let mut frame = Vec::with_capacity(HEAD_BYTES + data.len() + TAIL_BYTES);
    frame.extend(length);
    frame.extend(masked_crc(&length).to_le_bytes());
    frame.extend_from_slice(&data);
    frame.extend(masked_crc(&data).to_le_bytes());
    frame
}

fn masked_crc(data: &[u8]) -> u32 {
    let crc = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, data) as u32;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The next frame of a file.
#[derive(Debug, PartialEq)]
pub(crate) enum Frame {
    Whole {
        event: Event,
        /// Bytes of the frame.
        bytes: u64,
    },
    /// The file ends.
    End,
    /// The file ends within the frame, or its last frame is damaged: a crash cut it short.
    Torn,
}

/// Reads the next frame of a file with `left` bytes from here on.
///
/// # Errors
/// A failed read, or a damaged frame that is not the last one.
pub(crate) fn read_frame(file: &mut impl Read, left: u64) -> io::Result<Frame> {
    let fixed_bytes = (HEAD_BYTES + TAIL_BYTES) as u64;
    if left == 0 {
        return Ok(Frame::End);
    }
    if left < fixed_bytes {
        return Ok(Frame::Torn);
    }

    let damaged = || io::Error::new(io::ErrorKind::InvalidData, "a damaged event");
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let mut crc = [0; 4];
    file.read_exact(&mut crc)?;
    if u32::from_le_bytes(crc) != masked_crc(&length) {
        // A file system may fill the end of a file with zeros after a power failure.
        let is_zeros = length == [0; 8] && crc == [0; 4] && is_zeros(file)?;
        return if is_zeros {
            Ok(Frame::Torn)
        } else {
            Err(damaged())
        };
    }
    let length = u64::from_le_bytes(length);
    if length > left - fixed_bytes {
        return Ok(Frame::Torn);
    }
    if length > MAX_EVENT_BYTES {
        return Err(damaged());
    }

    let mut data = vec![0; length as usize];
    file.read_exact(&mut data)?;
    file.read_exact(&mut crc)?;
    let bytes = length + fixed_bytes;
    if u32::from_le_bytes(crc) == masked_crc(&data)
        && let Ok(event) = Event::decode(&*data)
    {
        return Ok(Frame::Whole { event, bytes });
    }
    if bytes == left {
        Ok(Frame::Torn)
    } else {
        Err(damaged())
    }
}

/// Whether the rest of the file is zeros.
fn is_zeros(file: &mut impl Read) -> io::Result<bool> {
    let mut buffer = [0; 4096];
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(true);
        }
        if buffer[..read].iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The CRC-32C of RFC 3720, appendix B.4: 32 zeros; and an event in the bytes of
    /// TensorBoard's own writer.
    #[test]
    fn bytes_are_those_of_tensorboard() {
        let crc = crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, &[0; 32]);
        assert_eq!(crc, 0x8a91_36aa);

        let event = Event {
            wall_time: 1.5,
            step: 3,
            summary: Some(Summary {
                value: vec![Value {
                    tag: "a".to_owned(),
                    simple_value: Some(0.5),
                }],
            }),
            ..Event::default()
        };
        let data = [
            9, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f, 0x10, 3, 0x2a, 10, 10, 8, 10, 1, b'a', 0x15, 0, 0, 0,
            0x3f,
        ];
        let frame = frame(&event);
        assert_eq!(&frame[HEAD_BYTES..HEAD_BYTES + data.len()], data);
        assert_eq!(frame.len(), HEAD_BYTES + data.len() + TAIL_BYTES);
    }

    #[test]
    fn damage_is_no_crash() {
        let event = Event {
            step: 1,
            ..Event::default()
        };
        let one = frame(&event);
        let two = [&one[..], &one].concat();
        for at in 0..one.len() {
            let mut damaged = two.clone();
            damaged[at] ^= 1;
            read_frame(&mut &*damaged, two.len() as u64).unwrap_err();
        }
        let mut last = one.clone();
        last[HEAD_BYTES] ^= 1;
        let torn = read_frame(&mut &*last, one.len() as u64).unwrap();
        assert_eq!(torn, Frame::Torn);
        assert_eq!(read_frame(&mut &[0; 99][..], 99).unwrap(), Frame::Torn);
        read_frame(&mut &[1; 99][..], 99).unwrap_err();
    }

    proptest! {
        /// Frames read back, and every prefix of the last one is torn.
        #[test]
        fn frames_read_back(step: i64, wall_time: f64, values: Vec<(String, f32)>, cut: prop::sample::Index) {
            let value = values.into_iter().map(|(tag, value)| Value { tag, simple_value: Some(value) });
            let event = Event {
                wall_time, step, summary: Some(Summary { value: value.collect() }), ..Event::default()
            };
            let bytes = frame(&event);
            let Frame::Whole { event: read, bytes: read_bytes } = read_frame(&mut &*bytes, bytes.len() as u64).unwrap()
            else { panic!("no frame") };
            prop_assert_eq!(frame(&read), bytes.clone());
            prop_assert_eq!(read_bytes, bytes.len() as u64);

            let cut = 1 + cut.index(bytes.len() - 1);
            prop_assert_eq!(read_frame(&mut &bytes[..cut], cut as u64).unwrap(), Frame::Torn);
        }
    }
}
