//! The header of a safetensors file: strict parsing of untrusted bytes, and encoding.
//!
//! A safetensors file is `u64 length n | n bytes of JSON | data`. The JSON maps each tensor's name
//! to its dtype, shape and byte range in the data; `__metadata__` maps strings to strings. The
//! tensors cover the data without hole or overlap. Source: the README of huggingface/safetensors.

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::ops::Range;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Maximum header size, as in the reference implementation.
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// Its dtype as spelled in the file: "F32", "BF16", ...
    pub dtype: String,
    /// Extent of each dimension.
    pub shape: Vec<u64>,
    /// Its byte range, from the start of the data.
    pub range: Range<u64>,
}

impl TensorEntry {
    /// Number of elements; `u64::MAX` if there are more, which parsing rejects.
    pub fn elems(&self) -> u64 {
        // Without elements, whatever the product of the other extents.
        if self.shape.contains(&0) {
            return 0;
        }
        elems_of(&self.shape).unwrap_or(u64::MAX)
    }
}

/// The checked header of a safetensors file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(not(feature = "testing"), allow(unreachable_pub))]
pub struct Header {
    /// Free text of the writer.
    pub metadata: BTreeMap<String, String>,
    /// The tensors by ascending range; they cover the data without hole or overlap.
    pub tensors: Vec<TensorEntry>,
    /// Offset of the data in the file.
    pub data_start: u64,
}

#[cfg_attr(not(feature = "testing"), allow(unreachable_pub))]
impl Header {
    /// Returns the length field: the bytes of JSON after the first eight, in a file of
    /// `file_bytes`.
    ///
    /// # Errors
    /// The length exceeds the file or the format's limit.
    pub fn json_bytes(first: [u8; 8], file_bytes: u64) -> Result<u64, String> {
        let n = u64::from_le_bytes(first);
        if n > MAX_HEADER_BYTES {
            return Err(format!(
                "the header has {n} bytes; the limit is {MAX_HEADER_BYTES}"
            ));
        }
        if n.checked_add(8).is_none_or(|end| end > file_bytes) {
            return Err(format!(
                "the header has {n} bytes, the file has {file_bytes}"
            ));
        }
        Ok(n)
    }

    /// Parses and checks the JSON of a file of `file_bytes` bytes.
    ///
    /// # Errors
    /// The broken rule of the format.
    pub fn parse(json: &[u8], file_bytes: u64) -> Result<Self, String> {
        if json.first() != Some(&b'{') {
            return Err("the header does not start with '{'".into());
        }
        let raw: RawHeader = serde_json::from_slice(json).map_err(|e| format!("header: {e}"))?;
        let data_start = 8 + json.len() as u64;
        let data_bytes = file_bytes
            .checked_sub(data_start)
            .ok_or("the file ends inside its header")?;
        let mut tensors = raw.tensors;
        tensors.sort_by_key(|t| (t.range.start, t.range.end));
        let mut end = 0;

        for tensor in &tensors {
            check_size(tensor)?;
            if tensor.range.start != end {
                return Err(format!(
                    "tensor {:?} starts at byte {} of the data; the previous one ends at {end}",
                    tensor.name, tensor.range.start
                ));
            }
            end = tensor.range.end;
        }

        if end != data_bytes {
            return Err(format!(
                "the tensors end at byte {end} of the data, which has {data_bytes} bytes"
            ));
        }

        Ok(Self {
            metadata: raw.metadata,
            tensors,
            data_start,
        })
    }

    /// Encodes the header as the first bytes of a file, padded with spaces until
    /// `8 + json + reserve_bytes` is a multiple of `align_bytes`, so that data after the first
    /// `reserve_bytes` is aligned.
    pub fn encode(&self, align_bytes: u64, reserve_bytes: u64) -> Vec<u8> {
        let mut json = String::from("{");
        if !self.metadata.is_empty() {
            let entries: Vec<String> = self
                .metadata
                .iter()
                .map(|(k, v)| format!("{}:{}", quote(k), quote(v)))
                .collect();
            json += &format!("\"__metadata__\":{{{}}}", entries.join(","));
        }

        for t in &self.tensors {
            let comma = if json.len() > 1 { "," } else { "" };
            json += &format!(
                "{comma}{}:{{\"dtype\":{},\"shape\":{:?},\"data_offsets\":[{},{}]}}",
                quote(&t.name),
                quote(&t.dtype),
                t.shape,
                t.range.start,
                t.range.end
            );
        }

        json.push('}');
        let end = 8 + json.len() as u64 + reserve_bytes;
        let pad = end.next_multiple_of(align_bytes) - end;
        json.extend(std::iter::repeat_n(' ', pad as usize));
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json.into_bytes());

        bytes
    }
}

fn quote(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Bits of an element; `None` for a dtype that the format does not define.
fn dtype_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ"
        | "F8_E5M2FNUZ" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// The product of the extents, from the left as the reference implementation takes it; `None` if it
/// exceeds 64 bits.
fn elems_of(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d))
}

fn check_size(tensor: &TensorEntry) -> Result<(), String> {
    let name = &tensor.name;
    let bits = dtype_bits(&tensor.dtype)
        .ok_or_else(|| format!("tensor {name:?}: unknown dtype {:?}", tensor.dtype))?;
    let bits = elems_of(&tensor.shape)
        .and_then(|n| n.checked_mul(bits))
        .ok_or_else(|| {
            format!(
                "tensor {name:?}: the size of shape {:?} exceeds 64 bits",
                tensor.shape
            )
        })?;

    if !bits.is_multiple_of(8) {
        return Err(format!("tensor {name:?}: {bits} bits are not whole bytes"));
    }
    match tensor.range.end.checked_sub(tensor.range.start) {
        Some(bytes) if bytes == bits / 8 => Ok(()),
        Some(bytes) => Err(format!(
            "tensor {name:?}: {bytes} bytes, its shape and dtype require {}",
            bits / 8
        )),
        None => Err(format!("tensor {name:?}: it ends before it starts")),
    }
}

struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: Vec<TensorEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader {
                    metadata: BTreeMap::new(),
                    tensors: Vec::new(),
                };

                let mut names = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !names.insert(name.clone()) {
                        return Err(A::Error::custom(format!("{name:?} occurs twice")));
                    }
                    if name == "__metadata__" {
                        header.metadata = map.next_value()?;
                    } else {
                        let RawTensor {
                            dtype,
                            shape,
                            data_offsets: (start, end),
                        } = map.next_value()?;
                        header.tensors.push(TensorEntry {
                            name,
                            dtype,
                            shape,
                            range: start..end,
                        });
                    }
                }

                Ok(header)
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, shape: &[u64], range: Range<u64>) -> TensorEntry {
        TensorEntry {
            name: name.into(),
            dtype: "F32".into(),
            shape: shape.into(),
            range,
        }
    }

    #[test]
    fn encoded_header_parses_back() {
        let header = Header {
            metadata: BTreeMap::from([("a \"quoted\" key".into(), "v\n".into())]),
            tensors: vec![
                entry("x", &[2, 3], 0..24),
                entry("empty", &[0], 24..24),
                entry("scalar", &[], 24..28),
            ],
            data_start: 0,
        };

        let bytes = header.encode(4096, 40);
        assert_eq!((bytes.len() + 40) % 4096, 0);
        let file_bytes = bytes.len() as u64 + 28;
        let n = Header::json_bytes(bytes[..8].try_into().unwrap(), file_bytes).unwrap();
        let read = Header::parse(&bytes[8..], file_bytes).unwrap();
        assert_eq!(n as usize, bytes.len() - 8);

        assert_eq!(
            read,
            Header {
                data_start: bytes.len() as u64,
                ..header
            }
        );
    }

    #[test]
    fn elements_of_any_shape_are_counted() {
        let big = 1 << 40;
        for (shape, elems) in [
            (&[big, big, 0][..], 0),
            (&[0, big, big], 0),
            (&[big, big], u64::MAX),
            (&[], 1),
            (&[2, 3], 6),
        ] {
            assert_eq!(entry("x", shape, 0..0).elems(), elems, "{shape:?}");
        }
    }

    #[test]
    fn each_broken_rule_is_named() {
        let tensor = |shape: &str, offsets: &str| {
            format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        let cases = [
            (String::new(), "start with"),
            ("[]".into(), "start with"),
            ("{".into(), "EOF"),
            (r#"{"a":1}"#.into(), "invalid type"),
            (r#"{"__metadata__":{"a":1}}"#.into(), "expected a string"),
            (tensor("[2]", "[0,4]"), "require 8"),
            (tensor("[1]", "[4,8]"), "the previous one ends at 0"),
            (tensor("[1]", "[4,0]"), "ends before it starts"),
            (tensor("[-1]", "[0,4]"), "invalid value"),
            (tensor("[4294967296,4294967296]", "[0,4]"), "exceeds"),
            (
                tensor("[1099511627776,1099511627776,0]", "[0,0]"),
                "exceeds",
            ),
            (
                tensor("[1]", "[0,4]").replace("F32", "F33"),
                "unknown dtype",
            ),
            (
                tensor("[1]", "[0,4]").replace("F32", "F4"),
                "not whole bytes",
            ),
            (
                tensor("[1]", "[0,4]").replace("\"shape\"", "\"shade\""),
                "unknown field",
            ),
            (tensor("[2]", "[0,8]"), "end at byte 8"),
            (
                format!(
                    "{},{}",
                    tensor("[1]", "[0,4]").trim_end_matches('}'),
                    r#""a":1}}"#
                ),
                "unknown field",
            ),
            (
                r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}"#.into(),
                "twice",
            ),
        ];

        for (json, expected) in cases {
            let error = Header::parse(json.as_bytes(), 8 + json.len() as u64 + 4).expect_err(&json);
            assert!(error.contains(expected), "{json}: {error}");
        }

        assert!(Header::json_bytes(u64::MAX.to_le_bytes(), u64::MAX).is_err());
        assert!(Header::json_bytes(93u64.to_le_bytes(), 100).is_err());
    }
}
