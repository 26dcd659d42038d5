//! JSON with comments and trailing commas. A repeated key is an error, as in DeepSpeed.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::ConfigFileError;

/// Parses a JSON object. Line and column in errors are those of `text`.
pub(super) fn parse(text: &str) -> Result<Map<String, Value>, ConfigFileError> {
    let mut plain = text.as_bytes().to_vec();
    json_strip_comments::strip_slice(&mut plain).map_err(|_| {
        ConfigFileError::Json("`/` outside of a string does not start a comment".to_owned())
    })?;
    // Stripping replaces block comments, including their line breaks, by spaces. Restoring the line
    // breaks keeps the line numbers of errors right.
    plain
        .iter_mut()
        .zip(text.bytes())
        .filter(|(_, byte)| *byte == b'\n')
        .for_each(|(plain, byte)| *plain = byte);
    let Strict(value) =
        serde_json::from_slice(&plain).map_err(|e| ConfigFileError::Json(e.to_string()))?;
    match value {
        Value::Object(map) => Ok(map),
        other => Err(ConfigFileError::Json(format!(
            "expected an object {{..}}, found {other}"
        ))),
    }
}

/// A JSON value whose objects have no repeated key.
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

    /// A whole number written as `5e8` becomes an integer.
    fn visit_f64<E: Error>(self, v: f64) -> Result<Strict, E> {
        const EXACT: f64 = 9_007_199_254_740_992.0;
        if v.fract() == 0.0 && v.abs() <= EXACT {
            return Ok(Strict((v as i64).into()));
        }
        Number::from_f64(v)
            .map(|n| Strict(Value::Number(n)))
            .ok_or_else(|| E::custom("number is not finite"))
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
                return Err(A::Error::custom(format!("duplicate key {key:?}")));
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
    fn comments_and_trailing_commas_are_ignored() {
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
    fn whole_floats_become_integers() {
        let expected =
            serde_json::json!({"a": 500_000_000, "b": 0.5, "c": -2, "d": 1e300, "e": null});
        assert_eq!(
            parsed(r#"{"a": 5e8, "b": 5e-1, "c": -2.0, "d": 1e300, "e": null}"#),
            expected
        );
    }

    #[test]
    fn errors_have_line_and_column() {
        let cases = [
            ("", "EOF while parsing a value at line 1 column 0"),
            ("[1]", "expected an object {..}, found [1]"),
            ("{\n  // x\n  \"a\" 1}", "expected `:` at line 3 column 7"),
            ("{\"a\": 1} x", "trailing characters at line 1 column 10"),
            (
                "{\"a\": 1, \"b\": {\"c\": 1, \"c\": 2}}",
                "duplicate key \"c\" at line 1 column 26",
            ),
            ("{\"a\": 1 /* ", "EOF while parsing an object"),
            (
                "{ /* one\n two */ \"a\" 1}",
                "expected `:` at line 2 column 13",
            ),
            ("{\"a\": 1 / 2}", "`/` outside of a string"),
            ("{\"a\": \"\\", "EOF while parsing a string"),
            ("{\"a\": [1,,]}", "expected value at line 1 column 10"),
            ("{\"a\": 1e999}", "number out of range"),
        ];

        for (text, expected) in cases {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_parses_or_fails(text: String) {
            let _ = parse(&text);
        }

        #[test]
        fn plain_json_is_unchanged(a: String, b: Vec<String>) {
            let value = serde_json::json!({ "a": a, "b": b });
            prop_assert_eq!(parsed(&value.to_string()), value);
        }
    }
}
