//! Allocation traces: `op,id,bytes` lines, `a` to allocate and `f` to free, plain or gzipped.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// One line of a trace. Ids are replaced by slots, which count from 0 and are reused, so that a
/// replay needs no map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum Op {
    /// Allocates `bytes` into a free slot.
    Allocate { slot: u32, bytes: u64 },
    /// Frees the allocation of a slot.
    Free { slot: u32 },
}

/// A valid trace: only live slots are freed.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The file's name without extensions.
    pub name: String,
    /// The operations in order.
    pub ops: Vec<Op>,
    /// The number of slots.
    pub slots: usize,
    /// The number of allocations.
    pub allocations: usize,
    /// The peak of live bytes.
    pub live_peak_bytes: u64,
}

/// More live bytes than this mean a damaged trace.
const MAX_LIVE_BYTES: u64 = 1 << 48;

impl Trace {
    /// Reads a file.
    ///
    /// # Errors
    /// The file cannot be read, or a line is invalid.
    pub fn read(path: &Path) -> Result<Self, String> {
        let fail = |e: std::io::Error| format!("{}: {e}", path.display());
        let mut bytes = Vec::new();
        File::open(path)
            .map_err(fail)?
            .read_to_end(&mut bytes)
            .map_err(fail)?;
        let mut text = String::new();
        if bytes.starts_with(&[0x1f, 0x8b]) {
            flate2::read::MultiGzDecoder::new(&bytes[..])
                .read_to_string(&mut text)
                .map_err(fail)?;
        } else {
            text = String::from_utf8(bytes).map_err(|e| format!("{}: {e}", path.display()))?;
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.split(".csv").next().unwrap_or_default().to_owned();
        Self::parse(name, &text).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// Parses the lines of a trace.
    ///
    /// # Errors
    /// A line is invalid; the error has its number.
    pub fn parse(name: String, text: &str) -> Result<Self, String> {
        let mut trace = Self {
            name,
            ..Self::default()
        };

        let mut live: HashMap<&str, (u32, u64)> = HashMap::new();
        let mut spare: Vec<u32> = Vec::new();
        let mut live_bytes = 0u64;
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || (number == 0 && line.starts_with("op,")) {
                continue;
            }
            let fail = |what: &str| format!("line {}: {what}: {line:?}", number + 1);
            let mut fields = line.split(',');
            let op = fields.next();
            let id = fields.next();
            let bytes = fields.next();
            let id = id.ok_or_else(|| fail("no id"))?;
            match op {
                Some("a") => {
                    let bytes: u64 = bytes
                        .and_then(|b| b.trim().parse().ok())
                        .ok_or_else(|| fail("no number of bytes"))?;
                    let slot = spare.pop().unwrap_or_else(|| {
                        trace.slots += 1;
                        (trace.slots - 1) as u32
                    });
                    if live.insert(id, (slot, bytes)).is_some() {
                        return Err(fail("this id is live already"));
                    }
                    live_bytes = live_bytes.saturating_add(bytes);
                    if live_bytes > MAX_LIVE_BYTES {
                        return Err(fail("more than 2^48 bytes are live"));
                    }
                    trace.live_peak_bytes = trace.live_peak_bytes.max(live_bytes);
                    trace.allocations += 1;
                    trace.ops.push(Op::Allocate { slot, bytes });
                }
                Some("f") => {
                    let (slot, bytes) =
                        live.remove(id).ok_or_else(|| fail("this id is not live"))?;
                    live_bytes -= bytes;
                    spare.push(slot);
                    trace.ops.push(Op::Free { slot });
                }
                _ => return Err(fail("neither a nor f")),
            }
        }

        Ok(trace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_become_slots() {
        let trace = Trace::parse(
            "t".into(),
            "op,id,bytes\na,7,100\na,9,50\nf,7,0\na,11,20\nf,9,0\n",
        )
        .expect("a valid trace");
        let expected = [
            Op::Allocate {
                slot: 0,
                bytes: 100,
            },
            Op::Allocate { slot: 1, bytes: 50 },
            Op::Free { slot: 0 },
            Op::Allocate { slot: 0, bytes: 20 },
            Op::Free { slot: 1 },
        ];
        assert_eq!(trace.ops, expected);
        assert_eq!(
            (trace.slots, trace.allocations, trace.live_peak_bytes),
            (2, 3, 150)
        );
    }

    #[test]
    fn an_invalid_line_is_reported_by_number() {
        for (text, what) in [
            ("a,1,x", "line 1: no number of bytes"),
            ("a,1,5\na,1,5", "line 2: this id is live already"),
            ("f,1,0", "line 1: this id is not live"),
            ("a,1,5\n\nz,1,0", "line 3: neither a nor f"),
            ("a", "line 1: no id"),
            (
                "a,1,5\na,2,18446744073709551615",
                "line 2: more than 2^48 bytes are live",
            ),
        ] {
            let error = Trace::parse("t".into(), text).expect_err("an invalid line");
            assert!(error.starts_with(what), "{error}");
        }
    }
}
