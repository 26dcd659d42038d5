//! The source of a template in pieces, and the calls that are put into it.
//!
//! `{% generation %}` is a tag of transformers only, and becomes a mark in the rendered text.
//! Loops report which message they are at, so that the rendering can tell which text is whose
//! ([`super::trace`]).

/// Marks of the begin and the end of a generation block: characters that no text has.
pub(super) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The variable with the methods `at` and `end` of [`super::trace::Trace`].
pub(super) const TRACE: &str = "__trace";

/// A piece of a source.
#[derive(Debug, PartialEq, Eq)]
enum Piece<'a> {
    /// Text, comments and raw blocks, as they are.
    Text(&'a str),
    /// `{{ }}`, as it is.
    Print(&'a str),
    /// `{% %}`.
    Block(Tag<'a>),
}

/// A block tag.
#[derive(Debug, PartialEq, Eq)]
struct Tag<'a> {
    /// What it does to the white space on its left: `-`, `+` or nothing.
    left: &'a str,
    inside: &'a str,
    right: &'a str,
}

impl<'a> Tag<'a> {
    /// The first word, and the rest.
    fn words(&self) -> (&'a str, &'a str) {
        let inside = self.inside.trim();
        let end = inside.find(|c: char| !is_name(c)).unwrap_or(inside.len());
        (&inside[..end], inside[end..].trim())
    }
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The pieces of a source. What does not end is text, which minijinja reports.
fn pieces(source: &str) -> Vec<Piece<'_>> {
    let mut pieces = Vec::new();
    let mut rest = source;
    // Where text begins that is not in `pieces` yet.
    let mut text = source;
    while let Some(at) = rest.find('{') {
        let tag = &rest[at..];
        let len = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map(|end| end + 2),
            Some(b'{') => tag_len(tag, "}}"),
            Some(b'%') => tag_len(tag, "%}"),
            _ => Some(1),
        };
        let Some(len) = len else { break };
        let raw = &tag[..len];
        rest = &tag[len..];
        let piece = match raw.get(..2) {
            Some("{{") => Piece::Print(raw),
            Some("{%") => {
                let tag = block(raw);
                if tag.words().0 == "raw" {
                    let end = end_of_raw(rest);
                    rest = &rest[end..];
                    continue;
                }
                Piece::Block(tag)
            }
            _ => continue,
        };
        let before = &text[..text.len() - tag.len()];
        if !before.is_empty() {
            pieces.push(Piece::Text(before));
        }
        pieces.push(piece);
        text = rest;
    }
    if !text.is_empty() {
        pieces.push(Piece::Text(text));
    }
    pieces
}

/// The length of a tag, whose strings and brackets may have its end. `None` if it does not end.
fn tag_len(tag: &str, end: &str) -> Option<usize> {
    let mut depth = 0_usize;
    let mut quote = None;
    let mut escaped = false;
    for (at, character) in tag.char_indices().skip(2) {
        if let Some(open) = quote {
            match character {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                _ if character == open => quote = None,
                _ => {}
            }
            continue;
        }
        if depth == 0 && tag[at..].starts_with(end) {
            return Some(at + end.len());
        }
        match character {
            '"' | '\'' => quote = Some(character),
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

/// A block tag with its braces.
fn block(raw: &str) -> Tag<'_> {
    let is_sign = |c: char| c == '-' || c == '+';
    let inside = &raw[2..raw.len() - 2];
    let left = usize::from(inside.starts_with(is_sign));
    let right = inside.len() - usize::from(inside[left..].ends_with(is_sign));
    Tag {
        left: &inside[..left],
        inside: &inside[left..right],
        right: &inside[right..],
    }
}

/// The length of a raw block with its end.
fn end_of_raw(text: &str) -> usize {
    let mut from = 0;
    while let Some(at) = text[from..].find("{%") {
        let start = from + at;
        let Some(len) = text[start..].find("%}") else {
            break;
        };
        let end = start + len + 2;
        if block(&text[start..end]).words().0 == "endraw" {
            return end;
        }
        from = start + 2;
    }
    text.len()
}

/// A template for minijinja.
pub(super) struct Source {
    pub(super) text: String,
    /// Whether it has generation blocks.
    pub(super) marks: bool,
}

/// Replaces generation blocks by marks, and adds calls of [`TRACE`] to loops.
pub(super) fn rewrite(source: &str) -> Source {
    let mut text = String::with_capacity(source.len());
    let mut marks = false;
    // The loops that a piece is in: the variable, if it is one name.
    let mut loops: Vec<(usize, Option<&str>)> = Vec::new();
    for (id, piece) in pieces(source).into_iter().enumerate() {
        let tag = match piece {
            Piece::Text(raw) | Piece::Print(raw) => {
                text.push_str(raw);
                continue;
            }
            Piece::Block(tag) => tag,
        };
        let Tag {
            left,
            inside,
            right,
        } = tag;
        let (keyword, rest) = tag.words();
        let call = match keyword {
            "generation" | "endgeneration" => {
                marks = true;
                let mark = MARKS[usize::from(keyword == "endgeneration")];
                // The outer tags keep what the tag does to the white space around it.
                text.push_str(&format!(
                    "{{%{left} if true %}}{{{{ \"{mark}\" }}}}{{% endif {right}%}}"
                ));
                continue;
            }
            "for" => {
                let variable = loop_variable(rest);
                loops.push((id, variable));
                variable.map(|variable| format!("at({id}, {variable})"))
            }
            "endfor" => {
                let ended = loops.pop();
                ended.and_then(|(id, variable)| variable.map(|_| format!("end({id})")))
            }
            "set" => loops.last().and_then(|&(id, variable)| {
                let name = item_of_loop(rest, variable?)?;
                Some(format!("at({id}, {name})"))
            }),
            _ => None,
        };
        match call {
            None => text.push_str(&format!("{{%{left}{inside}{right}%}}")),
            // Of two tags, the last has what the tag does to the white space behind it.
            Some(call) => text.push_str(&format!(
                "{{%{left}{inside}%}}{{% do {TRACE}.{call} {right}%}}"
            )),
        }
    }
    Source { text, marks }
}

/// The variable of `for VARIABLE in ...`.
fn loop_variable(rest: &str) -> Option<&str> {
    let name = rest.split_whitespace().next()?;
    let next = rest[name.len()..].split_whitespace().next()?;
    (next == "in" && name.chars().all(is_name)).then_some(name)
}

/// The name of `set NAME = LIST[VARIABLE]`.
fn item_of_loop<'a>(rest: &'a str, variable: &str) -> Option<&'a str> {
    let (name, value) = rest.split_once('=')?;
    let (list, index) = value.trim().strip_suffix(']')?.split_once('[')?;
    let are_names = [name.trim(), list.trim()]
        .iter()
        .all(|one| !one.is_empty() && one.chars().all(is_name));
    (are_names && index.trim() == variable).then_some(name.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces as short text: `t` text, `p` print, `b` block.
    fn kinds(source: &str) -> Vec<String> {
        let kind = |piece: &Piece| match piece {
            Piece::Text(text) => format!("t:{text}"),
            Piece::Print(text) => format!("p:{text}"),
            Piece::Block(tag) => format!("b:{}|{}|{}", tag.left, tag.inside.trim(), tag.right),
        };
        pieces(source).iter().map(kind).collect()
    }

    #[test]
    fn tags_end_outside_of_strings_and_brackets() {
        for (source, expected) in [
            ("a{{ '}}' }}b", vec!["t:a", "p:{{ '}}' }}", "t:b"]),
            ("{{ {'a': {}} }}", vec!["p:{{ {'a': {}} }}"]),
            ("{%- if '%}\\'%}' +%}{", vec!["b:-|if '%}\\'%}'|+", "t:{"]),
            ("{# {{ a #}{{ b }}", vec!["t:{# {{ a #}", "p:{{ b }}"]),
            (
                "{% raw %}{{ a }}{% b %}{%- endraw -%}{{ c }}",
                vec!["t:{% raw %}{{ a }}{% b %}{%- endraw -%}", "p:{{ c }}"],
            ),
            ("{{ a", vec!["t:{{ a"]),
            ("é{%é", vec!["t:é{%é"]),
        ] {
            assert_eq!(kinds(source), expected, "{source}");
            let whole: String = pieces(source)
                .iter()
                .map(|piece| match piece {
                    Piece::Text(text) | Piece::Print(text) => (*text).to_owned(),
                    Piece::Block(tag) => format!("{{%{}{}{}%}}", tag.left, tag.inside, tag.right),
                })
                .collect();
            assert_eq!(whole, source);
        }
    }

    #[test]
    fn loops_report_their_message() {
        let rewritten = |source| rewrite(source).text;
        assert_eq!(
            rewritten("{%- for m in messages -%}\nx{%- endfor +%}"),
            "{%- for m in messages %}{% do __trace.at(0, m) -%}\nx{%- endfor %}{% do __trace.end(0) +%}"
        );
        assert_eq!(
            rewritten(
                "{% for i in range(2) %}{% set m = all[ i ] %}{% set n = all[i - 1] %}{% endfor %}"
            ),
            "{% for i in range(2) %}{% do __trace.at(0, i) %}{% set m = all[ i ] %}{% do __trace.at(0, m) %}\
             {% set n = all[i - 1] %}{% endfor %}{% do __trace.end(0) %}"
        );
        let unchanged =
            "{% for k, v in a.items() %}{% set m = a[k] %}{% endfor %}{% set b = a[i] %}";
        assert_eq!(rewritten(unchanged), unchanged);
    }
}
