//! The source of a template in pieces, and the calls that are put into it.
//!
//! Expressions become those of minijinja ([`super::expression`]). `{% generation %}` is a tag of
//! transformers only, and becomes a mark in the rendered text.
//! Loops report which message they are at, so that the rendering can tell which text is whose
//! ([`crate::examples::trace`]).

use super::expression::Macros;
use super::{expression, is_name, statement};

/// Marks of the begin and the end of a generation block: characters that no text has.
pub(in super::super) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The variable with the methods `at` and `end` of a trace.
pub(in super::super) const TRACE: &str = "__trace";

/// A piece of a source.
#[derive(Debug, PartialEq, Eq)]
enum Piece<'a> {
    /// Text, comments and raw blocks, as they are.
    Text(&'a str),
    /// `{{ }}`.
    Print(Tag<'a>),
    /// `{% %}`.
    Block(Tag<'a>),
}

/// A tag.
#[derive(Debug, PartialEq, Eq)]
struct Tag<'a> {
    raw: &'a str,
    /// The sign for the white space on its left: `-`, `+` or nothing.
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
            Some("{{") => Piece::Print(tag_of(raw)),
            Some("{%") => {
                let tag = tag_of(raw);
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

/// A tag with its braces.
fn tag_of(raw: &str) -> Tag<'_> {
    let is_sign = |c: char| c == '-' || c == '+';
    let inside = &raw[2..raw.len() - 2];
    let left = usize::from(inside.starts_with(is_sign));
    let right = inside.len() - usize::from(inside[left..].ends_with(is_sign));
    Tag {
        raw,
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
        if tag_of(&text[start..end]).words().0 == "endraw" {
            return end;
        }
        from = start + 2;
    }
    text.len()
}

/// A template for minijinja.
pub(in super::super) struct RewrittenTemplate {
    pub(in super::super) text: String,
    /// Whether it has generation blocks.
    pub(in super::super) marks: bool,
}

/// Rewrites a template: expressions, generation blocks as marks, and loops with calls of [`TRACE`].
///
/// # Errors
/// A tag that jinja2 refuses, or that is not supported.
pub(in super::super) fn rewrite(source: &str) -> Result<RewrittenTemplate, String> {
    let mut text = String::with_capacity(2 * source.len());
    let mut marks = false;
    // The loops that a piece is in: the variable, if it is one name.
    let mut loops: Vec<(usize, Option<&str>)> = Vec::new();
    let mut line = 1;
    let pieces = pieces(source);
    let macros: Macros = pieces
        .iter()
        .filter_map(|piece| match piece {
            Piece::Block(tag) if tag.words().0 == "macro" => {
                statement::first_default(tag.words().1)
            }
            _ => None,
        })
        .collect();
    for (id, piece) in pieces.into_iter().enumerate() {
        let (Piece::Text(raw) | Piece::Print(Tag { raw, .. }) | Piece::Block(Tag { raw, .. })) =
            piece;
        let first_line = line;
        line += raw.matches('\n').count();
        let named = |why: String| format!("{why} in {:?} (line {first_line})", raw.trim());
        let tag = match piece {
            Piece::Text(_) => {
                text.push_str(raw);
                continue;
            }
            Piece::Print(tag) => {
                let value = expression::printed(tag.inside, &macros).map_err(named)?;
                text.push_str(&format!("{{{{{} {value} {}}}}}", tag.left, tag.right));
                continue;
            }
            Piece::Block(tag) => tag,
        };
        let Tag { left, right, .. } = tag;
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
        let inside = statement::rewritten(keyword, rest, &macros).map_err(named)?;
        // A variable that is set in a block is set there only.
        let opens_scope = keyword == "filter" || keyword == "set" && !rest.contains('=');
        match call {
            _ if opens_scope => {
                text.push_str(&format!("{{%{left} {inside} %}}{{% with {right}%}}"));
            }
            _ if matches!(keyword, "endset" | "endfilter") => {
                text.push_str(&format!("{{%{left} endwith %}}{{% {inside} {right}%}}"));
            }
            None => text.push_str(&format!("{{%{left} {inside} {right}%}}")),
            // Of two tags, the last has what the tag does to the white space behind it.
            Some(call) => text.push_str(&format!(
                "{{%{left} {inside} %}}{{% do {TRACE}.{call} {right}%}}"
            )),
        }
    }
    Ok(RewrittenTemplate { text, marks })
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
            Piece::Print(tag) => format!("p:{}|{}|{}", tag.left, tag.inside.trim(), tag.right),
            Piece::Block(tag) => format!("b:{}|{}|{}", tag.left, tag.inside.trim(), tag.right),
        };
        pieces(source).iter().map(kind).collect()
    }

    #[test]
    fn tags_end_outside_of_strings_and_brackets() {
        for (source, expected) in [
            ("a{{ '}}' }}b", vec!["t:a", "p:|'}}'|", "t:b"]),
            ("{{- {'a': {}} }}", vec!["p:-|{'a': {}}|"]),
            ("{%- if '%}\\'%}' +%}{", vec!["b:-|if '%}\\'%}'|+", "t:{"]),
            ("{# {{ a #}{{ b }}", vec!["t:{# {{ a #}", "p:|b|"]),
            (
                "{% raw %}{{ a }}{% b %}{%- endraw -%}{{ c }}",
                vec!["t:{% raw %}{{ a }}{% b %}{%- endraw -%}", "p:|c|"],
            ),
            ("{{ a", vec!["t:{{ a"]),
            ("é{%é", vec!["t:é{%é"]),
        ] {
            assert_eq!(kinds(source), expected, "{source}");
            let whole: String = pieces(source)
                .iter()
                .map(|piece| match piece {
                    Piece::Text(raw) => *raw,
                    Piece::Print(tag) | Piece::Block(tag) => tag.raw,
                })
                .collect();
            assert_eq!(whole, source);
        }
    }

    #[test]
    fn loops_report_their_message() {
        let rewritten = |source| rewrite(source).unwrap().text;
        assert_eq!(
            rewritten("{%- for m in messages -%}\nx{%- endfor +%}"),
            "{%- for m in (messages|__iter) %}{% do __trace.at(0, m) -%}\nx\
             {%- endfor %}{% do __trace.end(0) +%}"
        );
        assert_eq!(
            rewritten(
                "{% for i in range(2) %}{% set m = all[ i ] %}{% set n = all[0] %}{% endfor %}"
            ),
            "{% for i in (range(2)|__iter) %}{% do __trace.at(0, i) %}\
             {% set m = (all|__item(i)) %}{% do __trace.at(0, m) %}\
             {% set n = (all|__item(0)) %}{% endfor %}{% do __trace.end(0) %}"
        );
        assert_eq!(
            rewritten("{% for k, v in a %}{% set m = b %}{% endfor %}"),
            "{% for k, v in (a|__iter) %}{% set m = b %}{% endfor %}"
        );
    }

    #[test]
    fn unsupported_tags_name_their_line() {
        for (source, expected) in [
            (
                "\n{% do a %}",
                "the tag \"do\" is not supported in \"{% do a %}\" (line 2)",
            ),
            (
                "{{ a b }}",
                "expected the end before b in \"{{ a b }}\" (line 1)",
            ),
            ("{{ {[1]: 2} }}", "a list or a dictionary as a key"),
            ("{{ a ~ not b }}", "expected an expression before not"),
            ("{{ f(*a) }}", "arguments from a list are not supported"),
            ("{{ '\\N{DASH}' }}", "the escape \\N is not supported"),
            ("{% for a %}", "expected `in`"),
        ] {
            let error = rewrite(source).err().unwrap();
            assert!(error.contains(expected), "{error}");
        }
    }
}
