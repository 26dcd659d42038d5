//! Rows of JSON: one object a line, or one array of objects.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::DataError;

/// The longest row. A file without line breaks must not fill the memory.
const MAX_ROW_BYTES: u64 = 64 << 20;

/// The rows of a file, each an example, with the lines where they begin.
pub(super) type RowIterator = Box<dyn Iterator<Item = Result<(u32, String), DataError>>>;

/// The mark that some editors put at the start of UTF-8 text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The rows of a file, with the line at which each begins.
///
/// # Errors
/// The file cannot be opened. An item is an error if a row cannot be read.
pub(super) fn rows(path: &Path) -> Result<RowIterator, DataError> {
    let (file, _) = zero_ckpt::files::open(path).map_err(|source| DataError::Read {
        path: path.to_owned(),
        source,
    })?;
    let input = BufReader::with_capacity(1 << 16, file);
    Ok(Box::new(JsonRows::new(path, input)?))
}

/// The first row of the beginning of a file, if it is whole.
pub(super) fn first_row(path: &Path, start: &[u8]) -> Option<(u32, String)> {
    let mut rows = JsonRows::new(path, start).ok()?;
    rows.next()?.ok()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Lines,
    /// In an array, before its first row or behind a comma.
    Array,
    /// Behind the last row.
    End,
}

/// An iterator over rows.
struct JsonRows<R> {
    path: PathBuf,
    input: R,
    /// The current line, from 1.
    line: u32,
    layout: Layout,
}

impl<R: BufRead> JsonRows<R> {
    fn new(path: &Path, input: R) -> Result<Self, DataError> {
        let mut rows = Self {
            path: path.to_owned(),
            input,
            line: 1,
            layout: Layout::Lines,
        };
        let start = rows.buffer()?;
        if start.starts_with(BYTE_ORDER_MARK) {
            rows.input.consume(BYTE_ORDER_MARK.len());
        }
        if rows.skip_space()? == Some(b'[') {
            rows.input.consume(1);
            rows.layout = Layout::Array;
        }
        Ok(rows)
    }

    fn buffer(&mut self) -> Result<&[u8], DataError> {
        let path = &self.path;
        let buffer = self.input.fill_buf();
        buffer.map_err(|source| DataError::Read {
            path: path.clone(),
            source,
        })
    }

    /// The next byte, which is not consumed.
    fn peek(&mut self) -> Result<Option<u8>, DataError> {
        Ok(self.buffer()?.first().copied())
    }

    /// Skips white space and blank lines; returns the next byte.
    fn skip_space(&mut self) -> Result<Option<u8>, DataError> {
        loop {
            let next = self.peek()?;
            match next {
                Some(byte) if byte.is_ascii_whitespace() => self.consume(byte),
                _ => return Ok(next),
            }
        }
    }

    fn consume(&mut self, byte: u8) {
        self.input.consume(1);
        self.line += u32::from(byte == b'\n');
    }

    fn error(&self, line: u32, message: impl Into<String>) -> DataError {
        DataError::Example {
            path: self.path.clone(),
            line,
            message: message.into(),
        }
    }

    fn text(&self, line: u32, bytes: Vec<u8>) -> Result<String, DataError> {
        String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to() + 1;
            let message =
                format!("not UTF-8 text at byte {at} of it: convert it, such as with iconv");
            self.error(line, message)
        })
    }

    fn too_long(&self, line: u32) -> DataError {
        self.error(
            line,
            format!("longer than {MAX_ROW_BYTES} bytes, the limit for a row: divide it"),
        )
    }

    fn next_line(&mut self) -> Result<Option<(u32, String)>, DataError> {
        if self.skip_space()?.is_none() {
            return Ok(None);
        }

        let line = self.line;
        let mut bytes = Vec::new();
        let mut limited = self.input.by_ref().take(MAX_ROW_BYTES + 1);
        let read = limited.read_until(b'\n', &mut bytes);
        read.map_err(|source| DataError::Read {
            path: self.path.clone(),
            source,
        })?;
        if bytes.len() as u64 > MAX_ROW_BYTES {
            return Err(self.too_long(line));
        }

        self.line += 1;
        let text = self.text(line, bytes)?;
        Ok(Some((line, text.trim_end().to_owned())))
    }

    /// The next element of the array. Its text is everything before the next comma or bracket
    /// outside of strings and other brackets.
    fn next_element(&mut self) -> Result<Option<(u32, String)>, DataError> {
        self.skip_space()?;
        let line = self.line;
        let mut bytes = Vec::new();
        let mut depth = 0_u32;
        let mut in_string = false;
        let mut is_escaped = false;

        let end = loop {
            let Some(byte) = self.peek()? else {
                return Err(self.error(self.line, "the file ends within its array of rows"));
            };
            if !in_string && depth == 0 && matches!(byte, b',' | b']') {
                self.consume(byte);
                break byte;
            }
            if bytes.len() as u64 >= MAX_ROW_BYTES {
                return Err(self.too_long(line));
            }

            bytes.push(byte);
            self.consume(byte);
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if in_string => is_escaped = true,
                b'"' => in_string = !in_string,
                b'{' | b'[' if !in_string => depth += 1,
                b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
                _ => {}
            }
        };

        let text = self.text(line, bytes)?.trim_end().to_owned();
        if end == b']' {
            self.layout = Layout::End;
            let at = self.line;
            if self.skip_space()?.is_some() {
                return Err(self.error(at, "text behind the end of the array of rows: remove it"));
            }
            if text.is_empty() {
                return Ok(None);
            }
        } else if text.is_empty() {
            return Err(self.error(line, "a comma without a row before it: remove it"));
        }
        Ok(Some((line, text)))
    }
}

impl<R: BufRead> Iterator for JsonRows<R> {
    type Item = Result<(u32, String), DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = match self.layout {
            Layout::Lines => self.next_line(),
            Layout::Array => self.next_element(),
            Layout::End => Ok(None),
        };
        if !matches!(next, Ok(Some(_))) {
            self.layout = Layout::End;
        }
        next.transpose()
    }
}

/// A key of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) name: String,
    /// Whether its value is an array of objects.
    pub(super) has_objects: bool,
}

/// The keys of the object at the start of `text`, which may end early. Not valid JSON gives some
/// keys: they are for messages.
pub(super) fn keys(text: &str) -> Vec<Key> {
    let mut keys: Vec<Key> = Vec::new();
    let mut depth = 0_u32;
    // The last string of the object itself, which is a key if a colon follows.
    let mut string = None;
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => {
                let mut is_escaped = false;
                let end = characters.by_ref().find(|(_, c)| {
                    let is_end = *c == '"' && !is_escaped;
                    is_escaped = *c == '\\' && !is_escaped;
                    is_end
                });
                let Some((end, _)) = end else { break };
                string = serde_json::from_str::<String>(&text[at..=end]).ok();
            }
            '{' | '[' => depth += 1,
            '}' | ']' if depth == 1 => break,
            '}' | ']' => depth = depth.saturating_sub(1),
            ':' if depth == 1 => {
                let value = text[at + 1..].trim_start();
                let elements = value.strip_prefix('[').unwrap_or_default();
                keys.extend(string.take().map(|name| Key {
                    name,
                    has_objects: elements.trim_start().starts_with('{'),
                }));
            }
            _ => {}
        }
    }
    keys
}

/// Not in any text: it is private to fonts.
const NOT_A_NUMBER: &str = "\u{f8ff}NaN";

/// The text with strings in place of `NaN`, `Infinity` and `-Infinity`, which Python writes and
/// JSON does not have; `None` if it has none of them.
pub(super) fn without_nans(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len() + 16);
    let mut rest = text;
    let mut found = false;
    while let Some(at) = rest.find(['"', 'N', 'I', '-']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let name = ["NaN", "Infinity", "-Infinity"]
            .into_iter()
            .find(|name| rest.starts_with(name));
        let len = match name {
            Some(name) => {
                found = true;
                out.push_str(&format!("\"{NOT_A_NUMBER}\""));
                rest = &rest[name.len()..];
                continue;
            }
            None if rest.starts_with('"') => string_len(rest),
            None => 1,
        };
        out.push_str(&rest[..len]);
        rest = &rest[len..];
    }
    out.push_str(rest);
    found.then_some(out)
}

/// Whether a text has a string of [`without_nans`].
pub(super) fn has_nan(json: &str) -> bool {
    json.contains(NOT_A_NUMBER)
}

/// The bytes of the string at the start of `text`.
fn string_len(text: &str) -> usize {
    let mut is_escaped = false;
    let mut bytes = text.bytes().enumerate().skip(1);
    let end = bytes.find(|(_, byte)| {
        let is_end = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(text.len(), |(at, _)| at + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn all(text: &[u8]) -> Result<Vec<(u32, String)>, String> {
        let rows = JsonRows::new(Path::new("a"), text).map_err(|e| e.to_string())?;
        rows.map(|row| row.map_err(|e| e.to_string())).collect()
    }

    fn texts(rows: &[(u32, &str)]) -> Vec<(u32, String)> {
        rows.iter()
            .map(|(line, text)| (*line, (*text).to_owned()))
            .collect()
    }

    #[test]
    fn lines_have_their_numbers() {
        let text = b"\xef\xbb\xbf\r\n{\"a\": 1}\r\n\n  \n{\"b\": 2} \n{}";
        let expected = texts(&[(2, "{\"a\": 1}"), (5, "{\"b\": 2}"), (6, "{}")]);
        assert_eq!(all(text).unwrap(), expected);
        assert_eq!(all(b" \n\n").unwrap(), []);
        let error = all(b"{}\n{\"a\": \"\xe9\"}").unwrap_err();
        assert_eq!(
            error,
            "a, line 2: not UTF-8 text at byte 8 of it: convert it, such as with iconv"
        );
    }

    #[test]
    fn array_is_its_elements() {
        let text = "\n[\n {\"a\": \"],}\\\"\",\n  \"b\": [1, {}]},\r\n\n {}, 3\n]\n";
        let expected = texts(&[
            (3, "{\"a\": \"],}\\\"\",\n  \"b\": [1, {}]}"),
            (6, "{}"),
            (6, "3"),
        ]);
        assert_eq!(all(text.as_bytes()).unwrap(), expected);
        assert_eq!(all(b"[ ]").unwrap(), []);
        for (text, expected) in [
            ("[{},", "a, line 1: the file ends within"),
            ("[{}\n,,{}]", "a, line 2: a comma without a row"),
            ("[{}]\n\n{}", "a, line 1: text behind the end"),
        ] {
            let error = all(text.as_bytes()).unwrap_err();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }

    #[test]
    fn keys_of_a_beginning_are_found() {
        let text = "{\n \"a:\\\"\": {\"x\": [\"y\"]}, \"b\" : [ {}, \"c\"], \"d\": \"e";
        let key = |name: &str, has_objects| Key {
            name: name.to_owned(),
            has_objects,
        };
        assert_eq!(
            keys(text),
            [key("a:\"", false), key("b", true), key("d", false)]
        );
        assert_eq!(keys("{\"a\": 1}{\"b\": 2}"), [key("a", false)]);
        assert_eq!(keys("no object"), []);
    }

    #[test]
    fn only_numbers_are_replaced() {
        assert_eq!(without_nans(r#"{"a": "NaN \" NaN", "b": -1}"#), None);
        let text = without_nans(r#"{"a": NaN, "NaN": [-Infinity, "\\", Infinity]}"#).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(has_nan(&json["a"].to_string()));
        assert_eq!(json["NaN"][1], "\\");
        assert!(has_nan(&json["NaN"][2].to_string()));
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(Value::from),
            "[\\[\\]{}\"\\\\,:\n a\u{e9}]{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map("[a-c\"\\]]{1,3}", inner, 0..4)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        /// Lines and arrays, indented or not, have the same rows.
        #[test]
        fn layouts_have_the_same_rows(
            fields in prop::collection::vec(prop::collection::btree_map("[a-c]", value(), 0..3), 0..5),
        ) {
            let rows: Vec<Value> = fields
                .into_iter()
                .map(|fields| Value::Object(fields.into_iter().collect()))
                .collect();
            let lines: Vec<String> = rows.iter().map(Value::to_string).collect();
            let array = serde_json::to_string(&rows).unwrap();
            let indented = serde_json::to_string_pretty(&rows).unwrap();
            for text in [lines.join("\n"), array, indented] {
                let got = all(text.as_bytes()).unwrap();
                let got: Vec<Value> = got
                    .iter()
                    .map(|(_, row)| serde_json::from_str(row).unwrap())
                    .collect();
                prop_assert_eq!(&got, &rows);
            }
            for (line, row) in lines.iter().zip(&rows) {
                let names: Vec<String> = keys(line).into_iter().map(|key| key.name).collect();
                let expected: Vec<String> = row.as_object().unwrap().keys().cloned().collect();
                prop_assert_eq!(names, expected);
                prop_assert!(without_nans(line).is_none());
            }
        }
    }
}
