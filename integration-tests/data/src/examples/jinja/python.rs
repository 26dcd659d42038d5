//! Values of templates as Python prints them, for templates that were written for jinja2.
//!
//! minijinja prints a list as JSON and a float without exponent; jinja2 prints `str` of a Python
//! value, in which strings of lists have quotes.

use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State};

use super::refused;

/// Deepest nesting of a value that is printed.
const MAX_DEPTH: usize = 200;

/// Kinds of elements that Python does not print as a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Listed {
    Tuple,
    Keys,
    Values,
    Items,
    Range,
    /// The result of a filter that Python makes step by step.
    Generator,
}

/// Elements that Python has no list of.
#[derive(Debug)]
pub(super) struct Elements {
    pub(super) listed: Listed,
    pub(super) elements: Vec<Value>,
}

impl Elements {
    pub(super) fn value(listed: Listed, elements: Vec<Value>) -> Value {
        Value::from_object(Self { listed, elements })
    }
}

impl Object for Elements {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        match self.listed {
            Listed::Tuple | Listed::Range => ObjectRepr::Seq,
            Listed::Keys | Listed::Values | Listed::Items | Listed::Generator => {
                ObjectRepr::Iterable
            }
        }
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let is_sequence = matches!(self.listed, Listed::Tuple | Listed::Range);
        let index = key.as_usize().filter(|_| is_sequence)?;
        self.elements.get(index).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.elements.clone())
    }

    fn is_true(self: &Arc<Self>) -> bool {
        self.listed == Listed::Generator || !self.elements.is_empty()
    }
}

/// How a value is listed, if it is no list.
pub(super) fn listed(value: &Value) -> Option<Listed> {
    let elements = value.downcast_object_ref::<Elements>()?;
    Some(elements.listed)
}

/// Prints a value of `{{ }}`.
pub(super) fn print(out: &mut Output, _: &State, value: &Value) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => out.write_str(text),
        None => out.write_str(&text(value)?),
    };
    written.map_err(Error::from)
}

/// Whether a value is what `namespace()` makes.
pub(super) fn is_namespace(value: &Value) -> bool {
    let object = value.as_object();
    object.is_some_and(|object| object.type_name().ends_with("Namespace"))
}

/// Whether a value is a number to Python, for which a bool is one.
pub(super) fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
}

/// Python's `str`.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    match (value.kind(), value.as_str()) {
        (_, Some(text)) => Ok(text.to_owned()),
        (ValueKind::Undefined, _) => Ok(String::new()),
        _ => {
            let mut out = String::new();
            push_repr(&mut out, value, 0)?;
            Ok(out)
        }
    }
}

/// Appends Python's `repr`.
fn push_repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String if value.is_safe() => {
            return Err(refused(
                "a safe string in a list or a dictionary is printed",
            ));
        }
        ValueKind::String => push_quoted(out, value.as_str().unwrap_or_default()),
        ValueKind::Map if is_namespace(value) => {
            return Err(refused("a namespace is printed"));
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                push_repr(out, &key, depth + 1)?;
                out.push_str(": ");
                push_repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = match listed(value) {
                None => ("[", "]"),
                Some(Listed::Tuple) => ("(", ")"),
                Some(Listed::Keys) => ("dict_keys([", "])"),
                Some(Listed::Values) => ("dict_values([", "])"),
                Some(Listed::Items) => ("dict_items([", "])"),
                Some(Listed::Range | Listed::Generator) => {
                    let why = "a range, or what a filter makes, is printed: make a list of it";
                    return Err(refused(why));
                }
            };
            out.push_str(open);
            let mut number = 0;
            for element in value.try_iter()? {
                if number > 0 {
                    out.push_str(", ");
                }
                push_repr(out, &element, depth + 1)?;
                number += 1;
            }
            if number == 1 && open == "(" {
                out.push(',');
            }
            out.push_str(close);
        }
        _ => {
            let why = format!(
                "a {} is printed, which Python prints otherwise",
                value.kind()
            );
            return Err(refused(why));
        }
    }
    Ok(())
}

fn too_deep() -> Error {
    let why = format!("a value is nested more than {MAX_DEPTH} times");
    Error::new(ErrorKind::InvalidOperation, why)
}

/// A number as Python prints it.
fn number(value: &Value) -> String {
    match (value.is_integer(), f64::try_from(value.clone())) {
        (false, Ok(float)) => float_repr(float),
        _ => value.to_string(),
    }
}

/// Python's `repr` of a float: the shortest digits that read back, with an exponent outside of
/// 1e-4..1e16.
fn float_repr(float: f64) -> String {
    if float.is_nan() {
        return "nan".to_owned();
    }
    if float.is_infinite() {
        return if float > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if float != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{float}");
    match plain.contains('.') {
        true => plain,
        false => plain + ".0",
    }
}

/// A string with quotes, as Python's `repr`.
fn push_quoted(out: &mut String, text: &str) {
    let quote = match text.contains('\'') && !text.contains('"') {
        true => '"',
        false => '\'',
    };
    out.push(quote);
    for character in text.chars() {
        let code = u32::from(character);
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if character == quote => {
                out.push('\\');
                out.push(quote);
            }
            _ if is_printable(character) => out.push(character),
            _ if code < 0x100 => out.push_str(&format!("\\x{code:02x}")),
            _ if code < 0x1_0000 => out.push_str(&format!("\\u{code:04x}")),
            _ => out.push_str(&format!("\\U{code:08x}")),
        }
    }
    out.push(quote);
}

/// Whether Python prints a character as it is.
fn is_printable(character: char) -> bool {
    // Behind another character, combining marks are not escaped.
    let shown: String = format!("a{character}").escape_debug().collect();
    shown.chars().nth(1) == Some(character) || matches!(character, '"' | '\'')
}

/// The options of `json.dumps`.
struct JsonOptions {
    indent: Option<String>,
    between_items: String,
    behind_key: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// The value as `json.dumps(value, ensure_ascii=False)` of Python writes it, with its options.
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<Value> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;

    let indent = indent.filter(|indent| !indent.is_none());
    let indent = indent.map(|indent| match indent.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => indent_of_spaces(&indent),
    });
    let indent = indent.transpose()?;
    let (between_items, behind_key) = match separators.as_deref() {
        None if indent.is_some() => (",", ": "),
        None => (", ", ": "),
        Some([items, key]) => (&**items, &**key),
        Some(_) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators are two strings",
            ));
        }
    };
    let options = JsonOptions {
        between_items: between_items.to_owned(),
        behind_key: behind_key.to_owned(),
        indent,
        ensure_ascii: ensure_ascii.unwrap_or(false),
        sort_keys: sort_keys.unwrap_or(false),
    };
    let mut out = String::new();
    options.push(&mut out, value, 0)?;
    Ok(out)
}

/// `indent` spaces, of which a line has no more than a line of text needs.
fn indent_of_spaces(indent: &Value) -> Result<String, Error> {
    const MAX_SPACES: i64 = 1000;
    let spaces = i64::try_from(indent.clone())?;
    if spaces > MAX_SPACES {
        let why =
            format!("tojson: an indent of {spaces} spaces; at most {MAX_SPACES} are supported");
        return Err(Error::new(ErrorKind::InvalidOperation, why));
    }
    Ok(" ".repeat(spaces.max(0) as usize))
}

impl JsonOptions {
    fn push(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&json_number(value)),
            ValueKind::String => self.push_string(out, value.as_str().unwrap_or_default()),
            ValueKind::Map => self.push_map(out, value, depth)?,
            ValueKind::Seq | ValueKind::Iterable
                if matches!(listed(value), None | Some(Listed::Tuple)) =>
            {
                let elements: Vec<Value> = value.try_iter()?.collect();
                self.push_list(out, ['[', ']'], elements.len(), depth, |out, index| {
                    self.push(out, &elements[index], depth + 1)
                })?;
            }
            _ => {
                let why = format!(
                    "tojson: a value is {}, which JSON has no form of",
                    value.kind()
                );
                return Err(Error::new(ErrorKind::InvalidOperation, why));
            }
        }
        Ok(())
    }

    fn push_map(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            let name = match key.kind() {
                ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                ValueKind::None => "null".to_owned(),
                ValueKind::Bool => key.is_true().to_string(),
                _ => json_number(&key),
            };
            entries.push((name, value.get_item(&key)?));
        }
        if self.sort_keys {
            if value.try_iter()?.any(|key| key.as_str().is_none()) && entries.len() > 1 {
                return Err(refused("tojson: keys that are no strings are sorted"));
            }
            entries.sort_by(|(one, _), (other, _)| one.cmp(other));
        }
        self.push_list(out, ['{', '}'], entries.len(), depth, |out, index| {
            let (name, value) = &entries[index];
            self.push_string(out, name);
            out.push_str(&self.behind_key);
            self.push(out, value, depth + 1)
        })
    }

    fn push_list(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        len: usize,
        depth: usize,
        mut push: impl FnMut(&mut String, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(indent.as_str(), depth));
            }
        };
        out.push(open);
        for index in 0..len {
            if index > 0 {
                out.push_str(&self.between_items);
            }
            line(out, depth + 1);
            push(out, index)?;
        }
        if len > 0 {
            line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn push_string(&self, out: &mut String, text: &str) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                _ if u32::from(character) < 0x20 => {
                    out.push_str(&format!("\\u{:04x}", u32::from(character)));
                }
                _ if self.ensure_ascii && !character.is_ascii() => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }
}

fn json_number(value: &Value) -> String {
    match &*number(value) {
        "nan" => "NaN".to_owned(),
        "inf" => "Infinity".to_owned(),
        "-inf" => "-Infinity".to_owned(),
        number => number.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Renders an expression with `v`, the value of `json`.
    fn shown(expression: &str, json: &str) -> String {
        let environment = super::super::environment();
        let v: Value = serde_json::from_str(json).unwrap();
        let source = format!("{{{{ {expression} }}}}");
        let source = super::super::rewrite(&source).unwrap().text;
        match environment.render_str(&source, minijinja::context! { v }) {
            Ok(text) => text,
            Err(error) => format!("error: {error}"),
        }
    }

    /// The output of Python 3.11 and jinja2 3.1.
    #[test]
    fn values_are_printed_as_python_does() {
        for (expression, json, expected) in [
            (
                "v",
                "[1, 1.0, true, null, \"a\"]",
                "[1, 1.0, True, None, 'a']",
            ),
            ("v", r#"{"a": [], "b": {}}"#, "{'a': [], 'b': {}}"),
            ("v", "1e-07", "1e-07"),
            ("v", "1e16", "1e+16"),
            ("v", "123456789012345.6", "123456789012345.6"),
            ("v", "1e15", "1000000000000000.0"),
            ("v", "0.0001", "0.0001"),
            ("v", "-0.0", "-0.0"),
            ("v", "1.5e300", "1.5e+300"),
            ("v", "10000000000000000000", "10000000000000000000"),
            (
                "v",
                r#"["it's", "\"", "'\"", "\n\\\u0001\u00a0\u200b"]"#,
                r#"["it's", '"', '\'"', '\n\\\x01\xa0\u200b']"#,
            ),
            ("v", r#"["é中👋"]"#, "['é中👋']"),
            ("v | join('-')", "[1.0, [true], null]", "1.0-[True]-None"),
            ("v | string", "[1e-7]", "[1e-07]"),
            ("v | trim", r#"[{"a": "b"}]"#, "[{'a': 'b'}]"),
            ("v | trim('ab')", "\"abcba\"", "c"),
            ("v | upper", "[null]", "[NONE]"),
            ("v is iterable", "null", "False"),
            ("v is iterable", "\"a\"", "True"),
            ("w is iterable", "1", "True"),
            ("v is iterable", "1", "False"),
            ("v is sequence", "{}", "True"),
            ("v is number", "true", "True"),
            ("v.partition('=')", "\"a=b=c\"", "('a', '=', 'b=c')"),
            ("v.rpartition('=')[2]", "\"a=b=c\"", "c"),
            (
                "v.removeprefix('ab') ~ v.removesuffix('bc')",
                "\"abc\"",
                "ca",
            ),
            ("v.index('中')", "\"é中\"", "1"),
            ("v.zfill(5)", "\"-42\"", "-0042"),
            ("v.ljust(4) ~ '|' ~ v.rjust(4)", "\"é\"", "é   |   é"),
            (
                "v.zfill(99999999)",
                "\"a\"",
                "error: invalid operation: a width of 99999999; at most 65535 are supported (in <string>:1)",
            ),
        ] {
            assert_eq!(shown(expression, json), expected, "{expression} of {json}");
        }
    }

    /// The output of Python's `json.dumps`.
    #[test]
    fn json_is_that_of_python() {
        let value = r#"{"b": [1.0, 1e16, 1e-7, {}], "a": {"é": "\u0001\"/<", "n": null, "l": []}}"#;
        for (expression, expected) in [
            (
                "v | tojson",
                r#"{"b": [1.0, 1e+16, 1e-07, {}], "a": {"é": "\u0001\"/<", "n": null, "l": []}}"#,
            ),
            (
                "v | tojson(separators=(',', ':'), sort_keys=true, ensure_ascii=true)",
                r#"{"a":{"l":[],"n":null,"\u00e9":"\u0001\"/<"},"b":[1.0,1e+16,1e-07,{}]}"#,
            ),
            (
                "v.a | tojson(indent=2)",
                "{\n  \"é\": \"\\u0001\\\"/<\",\n  \"n\": null,\n  \"l\": []\n}",
            ),
            ("v.b[:1] | tojson(indent='\t')", "[\n\t1.0\n]"),
            ("v.b[:1] | tojson(indent=0)", "[\n1.0\n]"),
            ("'👋' | tojson(ensure_ascii=true)", r#""\ud83d\udc4b""#),
        ] {
            assert_eq!(shown(expression, value), expected, "{expression}");
        }
        for (expression, expected) in [
            ("w | tojson", "a value is undefined"),
            (
                "v | tojson(indent=99999999999)",
                "an indent of 99999999999 spaces",
            ),
            ("v | tojson(separators=[','])", "separators are two strings"),
        ] {
            let got = shown(expression, value);
            assert!(got.contains(expected), "{got}");
        }
    }
}
