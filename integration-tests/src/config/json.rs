//! JSON as people write configurations: with comments and commas before a closing bracket, and with no key
//! twice.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::ConfigFileError;

/// Parses a JSON object; places in error messages are those of the text given.
pub(super) fn parse(text: &str) -> Result<Map<String, Value>, ConfigFileError> {
    let plain = without_comments(text);
    let Strict(value) = serde_json::from_str(&plain).map_err(|e| ConfigFileError::Json { message: e.to_string() })?;
    match value {
        Value::Object(map) => Ok(map),
        other => Err(ConfigFileError::Json { message: format!("expected an object {{..}}, found {other}") }),
    }
}

/// The text with `//`, `#` and `/* */` comments and superfluous commas turned to spaces.
fn without_comments(text: &str) -> String {
    let mut out: Vec<u8> = Vec::with_capacity(text.len());
    let bytes = text.as_bytes();
    // The last comma, while only space has followed it.
    let mut comma = None;
    let mut i = 0;
    while i < bytes.len() {
        match (bytes[i], bytes.get(i + 1)) {
            (b'"', _) => {
                let end = string_end(bytes, i);
                out.extend_from_slice(&bytes[i..end]);
                (i, comma) = (end, None);
                continue;
            }
            (b'#', _) | (b'/', Some(b'/')) => {
                let end = bytes[i..].iter().position(|b| *b == b'\n').map_or(bytes.len(), |n| i + n);
                out.resize(end, b' ');
                i = end;
                continue;
            }
            (b'/', Some(b'*')) => {
                let close = bytes[i + 2..].windows(2).position(|w| w == b"*/");
                let end = close.map_or(bytes.len(), |n| i + 2 + n + 2);
                out.extend(bytes[i..end].iter().map(|b| if *b == b'\n' { b'\n' } else { b' ' }));
                i = end;
                continue;
            }
            (b'}' | b']', _) => {
                if let Some(at) = comma.take() {
                    out[at] = b' ';
                }
            }
            (b',', _) => comma = Some(out.len()),
            (b, _) if b.is_ascii_whitespace() => {}
            _ => comma = None,
        }
        out.push(bytes[i]);
        i += 1;
    }
    // Comments begin and end at ASCII characters, so what is left is UTF-8.
    String::from_utf8(out).unwrap_or_default()
}

/// The end of the string that starts at `start`.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut i = start + 1;
    while i < bytes.len() {
        match bytes[i] {
            b'\\' => i += 2,
            b'"' => return i + 1,
            _ => i += 1,
        }
    }
    bytes.len()
}

/// A JSON value whose objects have no key twice.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Strict;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, v: bool) -> Result<Strict, E> {
        Ok(Strict(v.into()))
    }

    fn visit_u64<E: Error>(self, v: u64) -> Result<Strict, E> {
        Ok(Strict(v.into()))
    }

    fn visit_i64<E: Error>(self, v: i64) -> Result<Strict, E> {
        Ok(Strict(v.into()))
    }

    /// A whole number may be written as `5e8`; it is the integer then.
    fn visit_f64<E: Error>(self, v: f64) -> Result<Strict, E> {
        const EXACT: f64 = 9_007_199_254_740_992.0;
        if v.fract() == 0.0 && v.abs() <= EXACT {
            return Ok(Strict((v as i64).into()));
        }
        Number::from_f64(v).map(|n| Strict(Value::Number(n))).ok_or_else(|| E::custom("a number that is not finite"))
    }

    fn visit_str<E: Error>(self, v: &str) -> Result<Strict, E> {
        Ok(Strict(v.into()))
    }

    fn visit_unit<E: Error>(self) -> Result<Strict, E> {
        Ok(Strict(Value::Null))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Strict, A::Error> {
        let mut all = Vec::new();
        while let Some(Strict(v)) = seq.next_element()? {
            all.push(v);
        }
        Ok(Strict(Value::Array(all)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strict, A::Error> {
        let mut all = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            if all.contains_key(&key) {
                return Err(A::Error::custom(format!("the key {key:?} is there twice")));
            }
            let Strict(value) = map.next_value()?;
            all.insert(key, value);
        }
        Ok(Strict(Value::Object(all)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(text: &str) -> Value {
        Value::Object(parse(text).unwrap())
    }

    #[test]
    fn comments_and_last_commas_are_passed_over() {
        let text = r#"
            // a comment with "quotes" and {brackets}
            {   # another
                "a": 1, /* one
                more, */ "b": [1, 2, // two
                ],
                "url": "http://x#y", "escaped": "\"// no comment",
                "c": {"d": true,}, /* last */
            }
        "#;
        let expected = serde_json::json!({
            "a": 1, "b": [1, 2], "url": "http://x#y", "escaped": "\"// no comment", "c": {"d": true}
        });
        assert_eq!(parsed(text), expected);
    }

    #[test]
    fn whole_numbers_may_be_written_with_an_exponent() {
        let expected = serde_json::json!({"a": 500_000_000, "b": 0.5, "c": -2, "d": 1e300, "e": null});
        assert_eq!(parsed(r#"{"a": 5e8, "b": 5e-1, "c": -2.0, "d": 1e300, "e": null}"#), expected);
    }

    #[test]
    fn what_is_not_an_object_is_an_error_with_its_place() {
        let cases = [
            ("", "EOF while parsing a value at line 1 column 0"),
            ("[1]", "expected an object {..}, found [1]"),
            ("{\n  // x\n  \"a\" 1}", "expected `:` at line 3 column 7"),
            ("{\"a\": 1} x", "trailing characters at line 1 column 10"),
            ("{\"a\": 1, \"b\": {\"c\": 1, \"c\": 2}}", "the key \"c\" is there twice at line 1 column 26"),
            ("{\"a\": 1 /* ", "EOF while parsing an object"),
            ("{\"a\": \"\\", "EOF while parsing a string"),
            ("{\"a\": [1,,]}", "trailing comma at line 1 column 11"),
            ("{\"a\": 1e999}", "number out of range"),
        ];
        for (text, expected) in cases {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_an_object_or_an_error(text: String) {
            let _ = parse(&text);
        }

        #[test]
        fn a_text_without_comments_is_left_alone(a: String, b: Vec<String>) {
            let value = serde_json::json!({ "a": a, "b": b });
            prop_assert_eq!(parsed(&value.to_string()), value);
        }
    }
}
