//! How a file stores its tokens: by its header, or else by its name.
//!
//! | file | tokens |
//! |---|---|
//! | `NAME.bin` without a header, such as nanoGPT's | u16 |
//! | `NAME.u32.bin` without a header | u32 |
//! | with the header of llm.c, as modded-nanogpt's | u16 (version 1), u32 (version 7) |
//! | of numpy (`.npy`), an array of one dimension | u16, u32, i32 |
//! | `NAME.bin` beside Megatron's index `NAME.idx` | u16, i32 |
//!
//! All are little-endian. A file without a header whose bytes look like something else is an error:
//! most of what is read with the wrong width is within a model's vocabulary.

use std::io::Read;
use std::path::Path;

use indicatif::HumanCount;
use zero_ckpt::files;

use super::DataError;
use super::start::Start;

/// llm.c: 256 numbers of 4 bytes before the tokens (`dev/data/data_common.py`).
const LLMC_HEADER_BYTES: u64 = 1024;
const LLMC_U16: (u32, u32) = (20240520, 1);
const LLMC_U32: (u32, u32) = (20240801, 7);

/// Other files of llm.c.
const LLMC_OTHERS: [(u32, &str); 3] = [
    (20240522, "evaluation data of llm.c"),
    (20240326, "a model of llm.c"),
    (20240328, "a tokenizer of llm.c"),
];

pub(super) const NUMPY_MAGIC: &[u8] = b"\x93NUMPY";
const MEGATRON_MAGIC: &[u8] = b"MMIDIDX\0\0";

/// Tokens that must look alike before a file is taken for another one.
const MIN_ALIKE: usize = 8;

/// How to write tokens with numpy.
const REMEDY: &str = "write them by numpy as `tokens.astype(numpy.uint16).tofile(\"NAME.bin\")`, or as uint32 to \
                      NAME.u32.bin";

/// The size of a token in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// Little-endian u16, `NAME.bin`.
    Two,
    /// Little-endian u32, `NAME.u32.bin`.
    Four,
}

impl Width {
    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    /// Calls `f` with the index and the value of each token in `bytes` until it returns true.
    pub(super) fn each(self, bytes: &[u8], mut f: impl FnMut(usize, u32) -> bool) -> bool {
        match self {
            Self::Two => {
                let mut tokens = bytes.as_chunks().0.iter().enumerate();
                tokens.any(|(i, token)| f(i, u32::from(u16::from_le_bytes(*token))))
            }
            Self::Four => {
                let mut tokens = bytes.as_chunks().0.iter().enumerate();
                tokens.any(|(i, token)| f(i, u32::from_le_bytes(*token)))
            }
        }
    }
}

/// The tokens of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TokenFormat {
    pub(super) width: Width,
    pub(super) len_tokens: u64,
    /// Bytes of the header.
    header_bytes: u64,
    /// The source of the format, for messages.
    pub(super) by: &'static str,
}

impl TokenFormat {
    /// The format of a file of tokens.
    ///
    /// # Errors
    /// The file is something else, or incomplete.
    pub(super) fn of(path: &Path, start: &Start) -> Result<Self, DataError> {
        let error = |message: String| DataError::Tokens {
            path: path.to_owned(),
            message,
        };
        if start.bytes.starts_with(NUMPY_MAGIC) {
            return Self::numpy(start).map_err(error);
        }
        if let Some(format) = Self::llmc(start).transpose() {
            return format.map_err(error);
        }
        if let Some(format) = Self::megatron(path, start)? {
            return Ok(format);
        }

        if looks_like_text(&start.bytes) {
            return Err(error(
                "text, in a file with the name of tokens: rename it, such as to NAME.txt"
                    .to_owned(),
            ));
        }
        let format = Self::by_name(path, start.file_bytes)?;
        match format.width {
            Width::Two => check_u16(&start.bytes),
            Width::Four => check_u32(&start.bytes),
        }
        .map_err(error)?;
        Ok(format)
    }

    /// The format that the name of a file without a header says.
    pub(super) fn by_name(path: &Path, file_bytes: u64) -> Result<Self, DataError> {
        let name = path.file_name().unwrap_or_default();
        let is_u32 = name.as_encoded_bytes().ends_with(b".u32.bin");
        let width = if is_u32 { Width::Four } else { Width::Two };
        if !file_bytes.is_multiple_of(width.bytes()) {
            return Err(DataError::OddLength {
                path: path.to_owned(),
                bytes: file_bytes,
                width: width.bytes(),
            });
        }
        Ok(Self {
            width,
            len_tokens: file_bytes / width.bytes(),
            header_bytes: 0,
            by: if is_u32 {
                "u32 by its name"
            } else {
                "u16 by its name"
            },
        })
    }

    /// The position of a token in the file.
    pub(super) fn position(&self, token: u64) -> u64 {
        self.header_bytes + token * self.width.bytes()
    }

    /// A format with a header that names the number of tokens.
    fn with_header(
        start: &Start,
        by: &'static str,
        width: Width,
        header_bytes: u64,
        len_tokens: u64,
    ) -> Result<Self, String> {
        let expected = len_tokens.saturating_mul(width.bytes());
        let found = start.file_bytes.saturating_sub(header_bytes);
        if expected != found {
            return Err(format!(
                "its header has {} tokens of {} bytes, and {} bytes follow: the file is not whole",
                HumanCount(len_tokens),
                width.bytes(),
                HumanCount(found)
            ));
        }
        Ok(Self {
            width,
            len_tokens,
            header_bytes,
            by,
        })
    }

    fn llmc(start: &Start) -> Result<Option<Self>, String> {
        let words = start.bytes.as_chunks().0;
        let [magic, version, tokens, ..] = words else {
            return Ok(None);
        };
        let [magic, version, tokens] = [magic, version, tokens].map(|b| u32::from_le_bytes(*b));
        if let Some((_, other)) = LLMC_OTHERS.iter().find(|(other, _)| *other == magic) {
            return Err(format!("{other}, and must be tokens"));
        }

        let width = match (magic, version) {
            LLMC_U16 => Width::Two,
            LLMC_U32 => Width::Four,
            _ if [LLMC_U16.0, LLMC_U32.0].contains(&magic) => {
                return Err(format!(
                    "it has a header of llm.c of version {version}, which is not known: {REMEDY}"
                ));
            }
            _ => return Ok(None),
        };
        let by = match width {
            Width::Two => "u16 by the header of llm.c",
            Width::Four => "u32 by the header of llm.c",
        };
        Self::with_header(start, by, width, LLMC_HEADER_BYTES, u64::from(tokens)).map(Some)
    }

    fn numpy(start: &Start) -> Result<Self, String> {
        let header = NumpyHeader::parse(&start.bytes)
            .ok_or("the header of a numpy file, which is not whole")?;
        let (width, by) = match header.dtype.as_str() {
            "<u2" => (Width::Two, "u16 by the header of numpy"),
            "<u4" => (Width::Four, "u32 by the header of numpy"),
            "<i4" => (Width::Four, "i32 by the header of numpy"),
            other => {
                return Err(format!(
                    "an array of numpy of the type {other:?}, and must be of uint16, uint32 or int32: {REMEDY}"
                ));
            }
        };
        let [len] = header.shape[..] else {
            return Err(format!(
                "an array of numpy of {} dimensions, and must have one: save tokens.reshape(-1)",
                header.shape.len()
            ));
        };
        Self::with_header(start, by, width, header.bytes, len)
    }

    /// By the index beside the file, if there is one.
    fn megatron(path: &Path, start: &Start) -> Result<Option<Self>, DataError> {
        let index = path.with_extension("idx");
        let failed = |source| DataError::Read {
            path: index.clone(),
            source,
        };
        if !files::is_present(&index).map_err(failed)? {
            return Ok(None);
        }
        let (file, _) = files::open(&index).map_err(failed)?;
        let mut header = Vec::new();
        file.take(18).read_to_end(&mut header).map_err(failed)?;

        let error = |message: String| DataError::Tokens {
            path: index.clone(),
            message,
        };
        let (magic, rest) = header.split_at(header.len().min(MEGATRON_MAGIC.len()));
        if magic != MEGATRON_MAGIC {
            return Err(error(format!(
                "not an index of Megatron, which a .idx beside {} must be: move one of them",
                path.display()
            )));
        }
        // Behind the version, in 8 bytes.
        let (width, by) = match rest.get(8) {
            Some(8) => (Width::Two, "u16 by the index of Megatron"),
            Some(4) => (Width::Four, "i32 by the index of Megatron"),
            code => {
                return Err(error(format!(
                    "an index of Megatron for numbers of the type {}, and must be for uint16 (8) or int32 (4)",
                    code.map_or("none".to_owned(), u8::to_string)
                )));
            }
        };
        let format = Self {
            width,
            len_tokens: start.file_bytes / width.bytes(),
            header_bytes: 0,
            by,
        };
        if format.position(format.len_tokens) != start.file_bytes {
            return Err(DataError::OddLength {
                path: path.to_owned(),
                bytes: start.file_bytes,
                width: width.bytes(),
            });
        }
        Ok(Some(format))
    }
}

/// The header of a numpy file (numpy.lib.format).
struct NumpyHeader {
    /// Bytes before the array.
    bytes: u64,
    /// Such as `<u2`.
    dtype: String,
    shape: Vec<u64>,
}

impl NumpyHeader {
    fn parse(start: &[u8]) -> Option<Self> {
        let [major, _, rest @ ..] = start.strip_prefix(NUMPY_MAGIC)? else {
            return None;
        };
        let (len, text) = if *major == 1 {
            let (len, text) = rest.split_first_chunk()?;
            (usize::from(u16::from_le_bytes(*len)), text)
        } else {
            let (len, text) = rest.split_first_chunk()?;
            (usize::try_from(u32::from_le_bytes(*len)).ok()?, text)
        };
        let bytes = start.len() - text.len() + len;
        let text = std::str::from_utf8(text.get(..len)?).ok()?;

        let value = |key: &str| Some(text.split_once(key)?.1.trim_start());
        let descr = value("'descr':")?;
        // Records have a list.
        let dtype = match descr.strip_prefix('\'') {
            Some(rest) => rest.split('\'').next()?.to_owned(),
            None => descr.split(']').next()?.to_owned(),
        };
        let shape = value("'shape':")?.strip_prefix('(')?.split(')').next()?;
        let sizes = shape.split(',').map(str::trim).filter(|n| !n.is_empty());
        let shape: Result<Vec<u64>, _> = sizes.map(str::parse).collect();
        Some(Self {
            bytes: bytes as u64,
            dtype,
            shape: shape.ok()?,
        })
    }
}

fn values(width: Width, bytes: &[u8]) -> Vec<u32> {
    let mut values = Vec::with_capacity(bytes.len() / width.bytes() as usize);
    width.each(bytes, |_, token| {
        values.push(token);
        false
    });
    values
}

/// Whether, of each group of `N` values, all but the first are at most `most`, and some first is
/// above `least`.
fn is_low_behind_first<const N: usize>(values: &[u32], most: u32, least: u32) -> bool {
    let groups = values.as_chunks::<N>().0;
    groups.len() >= MIN_ALIKE
        && groups
            .iter()
            .all(|group| group[1..].iter().all(|value| *value <= most))
        && groups.iter().any(|group| group[0] > least)
}

/// The upper half of a u32 token is 0, or below this for vocabularies of up to 524,288 tokens.
const MOST_UPPER_HALF: u32 = 7;

/// # Errors
/// The tokens are of 4 or 8 bytes each.
fn check_u16(start: &[u8]) -> Result<(), String> {
    let values = values(Width::Two, start);
    if is_low_behind_first::<4>(&values, 0, 0) {
        return Err(format!(
            "read as u16, all but every fourth token is 0: these are tokens of 8 bytes; {REMEDY}"
        ));
    }
    if is_low_behind_first::<2>(&values, 0, 0) {
        return Err(
            "read as u16, every second token is 0: these are u32 tokens; rename the file to NAME.u32.bin".to_owned(),
        );
    }
    // A vocabulary above 65,536 tokens. Many tokens, since few may be low by chance.
    let is_u32 = is_low_behind_first::<2>(&values, MOST_UPPER_HALF, 1 << 12);
    if values.len() >= 512 && is_u32 {
        return Err(format!(
            "read as u16, every second token is at most {MOST_UPPER_HALF}: these are u32 tokens; rename the file to \
             NAME.u32.bin"
        ));
    }
    Ok(())
}

/// # Errors
/// The tokens are of 2 or 8 bytes each.
fn check_u32(start: &[u8]) -> Result<(), String> {
    let values = values(Width::Four, start);
    if is_low_behind_first::<2>(&values, 0, 0) {
        return Err(format!(
            "read as u32, every second token is 0: these are tokens of 8 bytes; {REMEDY}"
        ));
    }
    // No vocabulary is so large.
    let large = values.iter().filter(|value| **value >= 1 << 20).count();
    if values.len() >= MIN_ALIKE && large * 2 > values.len() {
        return Err(
            "read as u32, most tokens are above 1,048,576: these are u16 tokens; rename the file to NAME.bin".to_owned(),
        );
    }
    Ok(())
}

/// Whether bytes are a text. The bytes of 32 tokens and more never are.
fn looks_like_text(start: &[u8]) -> bool {
    let is_control = |byte: &u8| byte.is_ascii_control() && !byte.is_ascii_whitespace();
    let text = match std::str::from_utf8(start) {
        Ok(text) => text,
        // A character is cut off at the end.
        Err(error) if error.error_len().is_none() => {
            return looks_like_text(&start[..error.valid_up_to()]);
        }
        Err(_) => return false,
    };
    text.len() >= 64 && !text.as_bytes().iter().any(is_control)
}

#[cfg(test)]
mod tests {
    use integration_tests::{Files, Folder};

    use std::fs;

    use super::*;

    /// The format of a file of this name and content, or the error.
    fn of(name: &str, content: &[u8]) -> Result<TokenFormat, String> {
        let dir = &Folder::on_disk();
        let path = dir.join(name);
        fs::write(&path, content).unwrap();
        in_folder(&path)
    }

    fn in_folder(path: &Path) -> Result<TokenFormat, String> {
        let start = Start::read(path).unwrap();
        let error = |e: DataError| {
            let folder = path.parent().unwrap().display().to_string();
            e.to_string().replace(&format!("{folder}/"), "")
        };
        TokenFormat::of(path, &start).map_err(error)
    }

    fn u16s(tokens: impl IntoIterator<Item = u16>) -> Vec<u8> {
        tokens.into_iter().flat_map(u16::to_le_bytes).collect()
    }

    fn u32s(tokens: impl IntoIterator<Item = u32>) -> Vec<u8> {
        tokens.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    fn format(width: Width, len_tokens: u64, header_bytes: u64, by: &'static str) -> TokenFormat {
        TokenFormat {
            width,
            len_tokens,
            header_bytes,
            by,
        }
    }

    fn llmc(magic: u32, version: u32, tokens: u32, bytes: &[u8]) -> Vec<u8> {
        let mut header = [0; 256];
        header[..3].copy_from_slice(&[magic, version, tokens]);
        [&u32s(header), bytes].concat()
    }

    #[test]
    fn header_of_llmc_is_skipped() {
        let tokens = u16s(1000..1040);
        assert_eq!(
            of("a.bin", &llmc(20240520, 1, 40, &tokens)),
            Ok(format(Width::Two, 40, 1024, "u16 by the header of llm.c"))
        );
        assert_eq!(
            of("a.bin", &llmc(20240801, 7, 40, &u32s(1000..1040))),
            Ok(format(Width::Four, 40, 1024, "u32 by the header of llm.c"))
        );
        for (content, expected) in [
            (
                llmc(20240520, 1, 41, &tokens),
                "a.bin: its header has 41 tokens of 2 bytes, and 80 bytes follow: the file is not whole",
            ),
            (
                llmc(20240520, 1, 40, &tokens)[..600].to_vec(),
                "a.bin: its header has 40 tokens of 2 bytes, and 0 bytes",
            ),
            (
                llmc(20240520, 2, 40, &tokens),
                "a.bin: it has a header of llm.c of version 2",
            ),
            (
                llmc(20240522, 1, 40, &tokens),
                "a.bin: evaluation data of llm.c, and must be tokens",
            ),
            (llmc(20240326, 3, 40, &tokens), "a.bin: a model of llm.c"),
        ] {
            let error = of("a.bin", &content).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    /// The header that numpy 2 writes.
    fn numpy(dtype: &str, shape: &str, bytes: &[u8]) -> Vec<u8> {
        let text = format!("{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}");
        let text = format!("{text:<117}\n");
        let len = (text.len() as u16).to_le_bytes();
        [NUMPY_MAGIC, &[1, 0], &len, text.as_bytes(), bytes].concat()
    }

    #[test]
    fn arrays_of_numpy_are_read() {
        let two = u16s(1000..1040);
        let four = u32s(1000..1040);
        for (name, content, width, by) in [
            (
                "a.npy",
                numpy("'<u2'", "(40,)", &two),
                Width::Two,
                "u16 by the header of numpy",
            ),
            (
                "a.bin",
                numpy("'<u4'", "(40,)", &four),
                Width::Four,
                "u32 by the header of numpy",
            ),
            (
                "a.u32.bin",
                numpy("'<i4'", "(40,)", &four),
                Width::Four,
                "i32 by the header of numpy",
            ),
        ] {
            assert_eq!(of(name, &content), Ok(format(width, 40, 128, by)));
        }
        for (content, expected) in [
            (
                numpy("'<i8'", "(20,)", &two),
                "a.npy: an array of numpy of the type \"<i8\", and must be of uint16",
            ),
            (
                numpy("[('a', '<u2')]", "(40,)", &two),
                "a.npy: an array of numpy of the type \"[('a', '<u2')\",",
            ),
            (
                numpy("'>u2'", "(40,)", &two),
                "a.npy: an array of numpy of the type \">u2\",",
            ),
            (
                numpy("'<u2'", "(4, 10)", &two),
                "a.npy: an array of numpy of 2 dimensions, and must have one",
            ),
            (
                numpy("'<u2'", "()", &two),
                "a.npy: an array of numpy of 0 dimensions",
            ),
            (
                numpy("'<u2'", "(41,)", &two),
                "a.npy: its header has 41 tokens of 2 bytes, and 80 bytes follow",
            ),
            (
                numpy("'<u2'", "(x,)", &two),
                "a.npy: the header of a numpy file, which is not whole",
            ),
            (
                NUMPY_MAGIC.to_vec(),
                "a.npy: the header of a numpy file, which is not whole",
            ),
        ] {
            let error = of("a.npy", &content).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
    }

    #[test]
    fn index_of_megatron_has_the_width() {
        let dir = &Folder::on_disk();
        let path = dir.join("a.bin");
        let index = |code: &[u8]| {
            let header = [MEGATRON_MAGIC, &1_u64.to_le_bytes(), code].concat();
            dir.write("a.idx", header);
        };
        fs::write(&path, u32s(1000..1020)).unwrap();
        index(&[4]);
        assert_eq!(
            in_folder(&path),
            Ok(format(Width::Four, 20, 0, "i32 by the index of Megatron"))
        );
        index(&[8]);
        assert_eq!(
            in_folder(&path),
            Ok(format(Width::Two, 40, 0, "u16 by the index of Megatron"))
        );
        for (code, expected) in [
            (
                &[5][..],
                "a.idx: an index of Megatron for numbers of the type 5",
            ),
            (
                &[],
                "a.idx: an index of Megatron for numbers of the type none",
            ),
        ] {
            index(code);
            let error = in_folder(&path).unwrap_err();
            assert!(error.starts_with(expected), "{error}");
        }
        fs::write(&path, b"abc").unwrap();
        index(&[8]);
        assert_eq!(
            in_folder(&path).unwrap_err(),
            "a.bin: 3 bytes are not a whole number of 2-byte tokens"
        );
        dir.write("a.idx", "TNTIDX");
        let error = in_folder(&path).unwrap_err();
        assert!(
            error.starts_with("a.idx: not an index of Megatron"),
            "{error}"
        );
    }

    #[test]
    fn wrong_widths_are_errors() {
        let u64s: Vec<u8> = (1000..1040_u64).flat_map(u64::to_le_bytes).collect();
        let large = || (0..600).map(|i| i * 400);
        for (name, content, expected) in [
            (
                "a.bin",
                u32s(1000..1040),
                "read as u16, every second token is 0: these are u32 tokens",
            ),
            (
                "a.bin",
                u32s(large()),
                "read as u16, every second token is at most 7: these are u32",
            ),
            (
                "a.bin",
                u64s.clone(),
                "read as u16, all but every fourth token is 0: these are tokens of 8 bytes",
            ),
            (
                "a.u32.bin",
                u64s,
                "read as u32, every second token is 0: these are tokens of 8 bytes",
            ),
            (
                "a.u32.bin",
                u16s(1000..1040),
                "read as u32, most tokens are above 1,048,576: these are u16",
            ),
            (
                "a.bin",
                "to be or not to be, é, ".repeat(9).into(),
                "text, in a file with the name of tokens",
            ),
        ] {
            let error = of(name, &content).unwrap_err();
            assert!(error.starts_with(&format!("{name}: {expected}")), "{error}");
        }
    }

    #[test]
    fn tokens_without_a_header_go_by_the_name() {
        let by_name = |name: &str, content: &[u8]| of(name, content).unwrap();
        let two = |n| format(Width::Two, n, 0, "u16 by its name");
        assert_eq!(by_name("a.bin", &u16s(1000..1040)), two(40));
        assert_eq!(by_name("a.bin", &u16s([5; 600])), two(600));
        assert_eq!(by_name("a.bin", &u16s([0; 600])), two(600));
        assert_eq!(by_name("a.bin", &u16s((0..600).map(|i| i % 8))), two(600));
        assert_eq!(by_name("a.bin", b"text"), two(2));
        assert_eq!(
            by_name("a.u32.bin", &u32s((0..600).map(|i| i * 400))),
            format(Width::Four, 600, 0, "u32 by its name")
        );
    }
}
