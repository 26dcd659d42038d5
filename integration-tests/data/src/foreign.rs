//! Recognises files by their first bytes that are no data to train on: archives, images, models.
//! Their bytes are never text.

use std::str::Utf8Error;

use super::start::Start;
use super::token_format::NUMPY_MAGIC;

/// A file of another kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Foreign {
    /// Its name, with an article.
    pub(super) what: &'static str,
    /// The remedy.
    pub(super) remedy: &'static str,
}

const PASS_DATA: &str = "pass text, rows of JSON (.jsonl) or tokens (.bin)";
const PASS_TEXT: &str =
    "pass text, rows of JSON (.jsonl), or tokens with the name .bin (u16) or .u32.bin";

/// The first bytes of a kind of file, from a position on.
struct Signature {
    at: usize,
    bytes: &'static [u8],
    foreign: Foreign,
}

const fn signature(
    at: usize,
    bytes: &'static [u8],
    what: &'static str,
    remedy: &'static str,
) -> Signature {
    Signature {
        at,
        bytes,
        foreign: Foreign { what, remedy },
    }
}

const SIGNATURES: &[Signature] = &[
    signature(
        0,
        b"\x1f\x8b\x08",
        "a gzip archive",
        "unpack it: gzip -dk FILE",
    ),
    signature(
        0,
        b"\x28\xb5\x2f\xfd",
        "a zstd archive",
        "unpack it: zstd -d FILE",
    ),
    signature(
        0,
        b"BZh91AY&SY",
        "a bzip2 archive",
        "unpack it: bzip2 -dk FILE",
    ),
    signature(0, b"\xfd7zXZ\0", "an xz archive", "unpack it: xz -dk FILE"),
    signature(
        0,
        b"\x04\x22\x4d\x18",
        "an lz4 archive",
        "unpack it: lz4 -d FILE",
    ),
    signature(
        0,
        b"7z\xbc\xaf\x27\x1c",
        "a 7z archive",
        "unpack it: 7z x FILE",
    ),
    signature(
        0,
        b"Rar!\x1a\x07",
        "a rar archive",
        "unpack it: unrar x FILE",
    ),
    signature(
        0,
        b"PK\x03\x04",
        "a zip archive (also .npz, .docx, models of PyTorch)",
        "unpack it, and pass the file within",
    ),
    signature(257, b"ustar", "a tar archive", "unpack it: tar -xf FILE"),
    signature(
        0,
        b"version https://git-lfs.github.com/spec/",
        "a pointer of Git LFS in place of the file",
        "download the file: git lfs pull",
    ),
    signature(
        0,
        b"MMIDIDX\0\0",
        "an index of Megatron",
        "pass the .bin beside it",
    ),
    signature(
        0,
        b"TNTIDX\0\0",
        "an index of an old Megatron",
        "write the data again with a newer one (mmap)",
    ),
    signature(
        0,
        b"ARROW1\0\0",
        "an Arrow file",
        "write its rows as .jsonl or .parquet",
    ),
    signature(
        0,
        b"\xff\xff\xff\xff\x10\0\0\0",
        "an Arrow stream, as datasets.save_to_disk writes",
        "write its rows by `dataset.to_json(\"ROWS.jsonl\")`",
    ),
    signature(0, b"%PDF-", "a PDF", "extract its text: pdftotext FILE"),
    signature(0, b"\x89PNG\r\n\x1a\n", "an image (PNG)", PASS_DATA),
    signature(0, b"\xff\xd8\xff", "an image (JPEG)", PASS_DATA),
    signature(0, b"GIF87a", "an image (GIF)", PASS_DATA),
    signature(0, b"GIF89a", "an image (GIF)", PASS_DATA),
    signature(8, b"WEBPVP8", "an image (WebP)", PASS_DATA),
    signature(8, b"WAVEfmt ", "a recording (WAV)", PASS_DATA),
    signature(0, b"OggS\0", "a recording (Ogg)", PASS_DATA),
    signature(0, b"fLaC\0", "a recording (FLAC)", PASS_DATA),
    signature(0, b"ID3\x03\0", "a recording (MP3)", PASS_DATA),
    signature(0, b"ID3\x04\0", "a recording (MP3)", PASS_DATA),
    signature(4, b"ftyp", "a film or a recording (MP4)", PASS_DATA),
    signature(0, b"\x7fELF", "a program", PASS_DATA),
    signature(0, b"SQLite format 3\0", "a database of SQLite", PASS_DATA),
    signature(0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", PASS_DATA),
    signature(0, b"GGUF\x02\0\0\0", "a model (GGUF)", PASS_DATA),
    signature(0, b"GGUF\x03\0\0\0", "a model (GGUF)", PASS_DATA),
    signature(
        0,
        b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46",
        "a pickle of PyTorch",
        PASS_DATA,
    ),
];

/// The kind of a file that is no data, by its first bytes.
pub(super) fn of(start: &Start) -> Option<Foreign> {
    let bytes = &start.bytes;
    let is_of = |signature: &&Signature| {
        bytes
            .get(signature.at..)
            .is_some_and(|rest| rest.starts_with(signature.bytes))
    };
    let found = SIGNATURES.iter().find(is_of);
    found.map(|signature| signature.foreign).or_else(|| {
        let what = if is_safetensors(start) {
            "a model (safetensors)"
        } else if is_pickle(start) {
            "a pickle of Python"
        } else {
            return None;
        };
        Some(Foreign {
            what,
            remedy: PASS_DATA,
        })
    })
}

/// The kind of a file that is neither tokens nor text.
pub(super) fn not_text(start: &Start) -> Option<Foreign> {
    const UTF16: Foreign = Foreign {
        what: "UTF-16 text",
        remedy: "convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW",
    };

    let bytes = &start.bytes[..start.bytes.len().min(PROBE_BYTES)];
    let marks: [&[u8]; 2] = [b"\xff\xfe", b"\xfe\xff"];
    if marks.iter().any(|mark| bytes.starts_with(mark)) {
        return Some(UTF16);
    }
    if !bytes.contains(&0) {
        return has_control_bytes(bytes).then_some(Foreign {
            what: "a binary file (not UTF-8, with control characters)",
            remedy: PASS_TEXT,
        });
    }

    let pairs = bytes.as_chunks::<2>().0;
    let is_half = |half: usize| {
        pairs
            .iter()
            .all(|pair| pair[half] == 0 && pair[1 - half] != 0)
    };
    if pairs.len() >= 4 && (is_half(0) || is_half(1)) {
        return Some(Foreign {
            what: "UTF-16 text, or tokens of 2 bytes",
            remedy: "convert text by iconv -f UTF-16LE -t UTF-8, and name tokens .bin",
        });
    }
    Some(Foreign {
        what: "a binary file (with bytes that are 0)",
        remedy: PASS_TEXT,
    })
}

/// Whether bytes are not UTF-8 and have control characters, which no text of another encoding has.
fn has_control_bytes(bytes: &[u8]) -> bool {
    let is_cut = |error: &Utf8Error| error.error_len().is_none();
    let is_utf8 = std::str::from_utf8(bytes).map_or_else(|error| is_cut(&error), |_| true);
    // Escape begins the codes of terminals and of Japanese encodings.
    let is_control = |byte: &u8| *byte < b' ' && !matches!(byte, 7..=13 | 27);
    !is_utf8 && bytes.iter().any(is_control)
}

/// A file with a 0 among its first bytes is considered binary.
pub(super) const PROBE_BYTES: usize = 8192;

/// The length of a header of JSON, and the header.
fn is_safetensors(start: &Start) -> bool {
    let Some((len, json)) = start.bytes.split_first_chunk() else {
        return false;
    };
    let len = u64::from_le_bytes(*len);
    let is_json = json.starts_with(b"{\"") || json.starts_with(b"{}");
    is_json && len >= 2 && len <= start.file_bytes
}

/// Protocol 4 or 5 with a frame that is within the file.
fn is_pickle(start: &Start) -> bool {
    let Some(([0x80, 4 | 5, 0x95], rest)) = start.bytes.split_first_chunk() else {
        return false;
    };
    let len = rest.first_chunk().map(|len| u64::from_le_bytes(*len));
    len.is_some_and(|len| len <= start.file_bytes)
}

/// Whether a file is parquet, which this program may read.
pub(super) fn is_parquet(start: &Start) -> bool {
    start.bytes.starts_with(b"PAR1")
}

/// Whether a file is an array of numpy.
pub(super) fn is_numpy(start: &Start) -> bool {
    start.bytes.starts_with(NUMPY_MAGIC)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(bytes: &[u8]) -> Start {
        Start {
            bytes: bytes.to_vec(),
            file_bytes: 4096,
        }
    }

    #[test]
    fn signatures_are_found() {
        for signature in SIGNATURES {
            let bytes = [&vec![b'a'; signature.at], signature.bytes, b"rest"].concat();
            assert_eq!(of(&start(&bytes)), Some(signature.foreign));
            let cut = &bytes[..signature.at + signature.bytes.len() - 1];
            assert_eq!(of(&start(cut)), None, "{}", signature.foreign.what);
        }
        let safetensors = [&64_u64.to_le_bytes()[..], b"{\"a\":"].concat();
        assert_eq!(
            of(&start(&safetensors)).unwrap().what,
            "a model (safetensors)"
        );
        let pickle = b"\x80\x04\x95\x40\0\0\0\0\0\0\0]";
        assert_eq!(of(&start(pickle)).unwrap().what, "a pickle of Python");
        // A length beyond the end.
        let tokens = [&(1_u64 << 40).to_le_bytes()[..], b"{\"a\":"].concat();
        assert_eq!(of(&start(&tokens)), None);
        assert_eq!(
            of(&start(b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff")),
            None
        );
    }

    #[test]
    fn text_has_no_zeros() {
        let what = |bytes: &[u8]| not_text(&start(bytes)).map(|foreign| foreign.what);
        assert_eq!(what("to be, café".as_bytes()), None);
        assert_eq!(what(b"caf\xe9 au lait\r\n\t\x1b[1m"), None);
        assert_eq!(what("caf\u{1}\u{e9}".as_bytes()), None);
        assert_eq!(
            what(b"\x1f\x9d\x90"),
            Some("a binary file (not UTF-8, with control characters)")
        );
        assert_eq!(what(b"\xff\xfet\0o\0"), Some("UTF-16 text"));
        assert_eq!(what(b"\xfe\xff\0t\0o"), Some("UTF-16 text"));
        let without_mark = Some("UTF-16 text, or tokens of 2 bytes");
        assert_eq!(what(b"t\0o\0 \0b\0e\0"), without_mark);
        assert_eq!(what(b"\0t\0o\0 \0b\0e"), without_mark);
        assert_eq!(
            what(b"ab\0c"),
            Some("a binary file (with bytes that are 0)")
        );
    }
}
