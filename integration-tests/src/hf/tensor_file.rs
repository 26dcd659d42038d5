//! One safetensors file: its header, and ranges of its tensors as `f32`.
//!
//! The format: 8 bytes of header length (little-endian), a JSON header, then the tensors' bytes. Only the
//! header is held in memory; values are read where they are asked for.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::{HfError, read_error};

/// A header longer than this is taken for a file of another kind (the limit of the format itself).
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Elements that are converted at a time.
pub(super) const CHUNK_ELEMS: usize = 1 << 16;

/// An open safetensors file whose header has been checked against its length.
pub(super) struct TensorFile {
    pub(super) path: PathBuf,
    file: File,
    header: Metadata,
    data_start: u64,
}

impl TensorFile {
    /// Opens the file and checks that its header describes all of it.
    pub(super) fn open(path: &Path) -> Result<Self, HfError> {
        let wrong = |message: String| HfError::TensorFile { path: path.to_owned(), message };
        let file = File::open(path).map_err(read_error(path))?;
        let len = file.metadata().map_err(read_error(path))?.len();
        if len < 8 {
            return Err(wrong(format!("it has {len} bytes, and the header's length takes 8")));
        }
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0).map_err(read_error(path))?;
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > MAX_HEADER_BYTES || header_bytes > len - 8 {
            return Err(wrong(format!("the header claims {header_bytes} bytes; the file has {len}")));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, 8).map_err(read_error(path))?;
        let header: Metadata = serde_json::from_slice(&header).map_err(|e| wrong(format!("its header: {e}")))?;
        let data_start = 8 + header_bytes;
        let expected = data_start + header.data_len() as u64;
        if expected != len {
            return Err(wrong(format!("its header describes {expected} bytes; the file has {len}")));
        }
        Ok(Self { path: path.to_owned(), file, header, data_start })
    }

    /// Names of all tensors.
    pub(super) fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// What the header says of a tensor.
    pub(super) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.header.info(name)
    }

    /// Reads `out.len()` elements from element `start` of a tensor.
    ///
    /// The caller has checked the range and the type (another type than the three is an I/O error here).
    pub(super) fn read(&self, info: &TensorInfo, start: u64, out: &mut [f32]) -> io::Result<()> {
        let convert: fn(&[u8], &mut [f32]) = match info.dtype {
            Dtype::F32 => |bytes, out| each(bytes, out, f32::from_le_bytes),
            Dtype::F16 => |bytes, out| each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            Dtype::BF16 => |bytes, out| each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            other => return Err(io::Error::new(io::ErrorKind::Unsupported, format!("type {other:?}"))),
        };
        let width = info.dtype.bitsize() / 8;
        let mut at = self.data_start + info.data_offsets.0 as u64 + start * width as u64;
        let mut buffer = vec![0; out.len().min(CHUNK_ELEMS) * width];
        for chunk in out.chunks_mut(CHUNK_ELEMS) {
            let bytes = &mut buffer[..chunk.len() * width];
            self.file.read_exact_at(bytes, at)?;
            convert(bytes, chunk);
            at += bytes.len() as u64;
        }
        Ok(())
    }
}

/// Decodes elements of `N` bytes.
fn each<const N: usize>(bytes: &[u8], out: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    let (elems, _) = bytes.as_chunks::<N>();
    for (o, b) in out.iter_mut().zip(elems) {
        *o = decode(*b);
    }
}
