//! Methods of Python's strings, dictionaries and lists.

use minijinja::Error;
use minijinja::value::{Kwargs, Value, ValueKind, from_args};

use super::operators::{self, equal, iterated};
use super::python::{Elements, Listed, listed, text};
use super::refused;

/// The greatest width to which a string is padded.
const MAX_WIDTH: i64 = u16::MAX as i64;

type Result<T = Value> = std::result::Result<T, Error>;

/// Calls a method.
///
/// # Errors
/// The method does not exist, is not supported, or fails as in Python.
pub(super) fn call(value: &Value, name: &str, args: &[Value]) -> Result {
    let unknown = || {
        Err(refused(format!(
            "the method {name} of a {} is not supported",
            value.kind()
        )))
    };
    if let Some(text) = value.as_str() {
        let takes_undefined = matches!(name, "format" | "join");
        if value.is_safe() || !takes_undefined && args.iter().any(Value::is_undefined) {
            let why = format!("{name} of a safe string, or with an undefined argument");
            return Err(refused(why));
        }
        return of_string(text, name, args).unwrap_or_else(unknown);
    }
    match value.kind() {
        ValueKind::Map => of_dictionary(value, name, args).unwrap_or_else(unknown),
        ValueKind::Seq | ValueKind::Iterable
            if listed(value).is_none_or(|l| l == Listed::Tuple) =>
        {
            of_list(value, name, args).unwrap_or_else(unknown)
        }
        // An object of minijinja itself.
        ValueKind::Plain => Err(Error::from(minijinja::ErrorKind::UnknownMethod)),
        _ => unknown(),
    }
}

fn of_dictionary(value: &Value, name: &str, args: &[Value]) -> Option<Result> {
    let keys = || Ok::<_, Error>(value.try_iter()?.collect::<Vec<Value>>());
    let no_args = || from_args::<()>(args);
    Some(match name {
        "get" => from_args(args).and_then(|(key, _): (&Value, Option<&Value>)| {
            let found = value.get_item(&operators::key(key)?)?;
            Ok(match found.is_undefined() {
                // Which may be undefined.
                true => args.get(1).cloned().unwrap_or_else(|| Value::from(())),
                false => found,
            })
        }),
        "keys" => no_args().and_then(|()| Ok(Elements::value(Listed::Keys, keys()?))),
        "values" => no_args().and_then(|()| {
            let values: Result<Vec<Value>> =
                keys()?.iter().map(|key| value.get_item(key)).collect();
            Ok(Elements::value(Listed::Values, values?))
        }),
        "items" => no_args().and_then(|()| Ok(Elements::value(Listed::Items, pairs(value)?))),
        "copy" => no_args().map(|()| value.clone()),
        _ => return None,
    })
}

/// The keys and values of a dictionary.
pub(super) fn pairs(value: &Value) -> Result<Vec<Value>> {
    let pair = |key: Value| {
        let of_key = value.get_item(&key)?;
        Ok(Elements::value(Listed::Tuple, vec![key, of_key]))
    };
    value.try_iter()?.map(pair).collect()
}

fn of_list(value: &Value, name: &str, args: &[Value]) -> Option<Result> {
    Some(match name {
        "count" => from_args(args).and_then(|(what,): (Value,)| {
            let same = value.try_iter()?.filter(|one| equal(one, &what));
            Ok(Value::from(same.count()))
        }),
        "index" => from_args(args).and_then(|(what,): (Value,)| {
            let place = value.try_iter()?.position(|one| equal(&one, &what));
            place
                .map(Value::from)
                .ok_or_else(|| refused("the value is not in the list"))
        }),
        "copy" if listed(value).is_none() => from_args(args).map(|()| value.clone()),
        _ => return None,
    })
}

/// White space to Python.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn stripped<'a>(text: &'a str, name: &str, characters: Option<&str>) -> &'a str {
    let is_stripped = |c: char| match characters {
        Some(characters) => characters.contains(c),
        None => is_space(c),
    };
    match name {
        "strip" => text.trim_matches(is_stripped),
        "lstrip" => text.trim_start_matches(is_stripped),
        _ => text.trim_end_matches(is_stripped),
    }
}

/// The part of a string between two indices, with the index at which it begins.
fn part(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(&str, usize)> {
    let len = text.chars().count() as i64;
    let place = |at: i64| {
        if at < 0 {
            (at + len).max(0)
        } else {
            at.min(len)
        }
    };
    let start_index = start.unwrap_or(0);
    if start_index > len {
        return None;
    }
    let [start, end] = [place(start_index), place(end.unwrap_or(len))];
    let byte = |at: i64| {
        text.char_indices()
            .nth(at as usize)
            .map_or(text.len(), |(at, _)| at)
    };
    (start <= end).then(|| (&text[byte(start)..byte(end)], start as usize))
}

/// The place of a string in a part of another one, in characters.
fn found(text: &str, name: &str, args: &[Value]) -> Result<Option<usize>> {
    let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let Some((part, from)) = part(text, start, end) else {
        return Ok(None);
    };
    let at = match name.starts_with('r') {
        true => part.rfind(what),
        false => part.find(what),
    };
    Ok(at.map(|at| from + part[..at].chars().count()))
}

fn strings(parts: Vec<String>) -> Value {
    Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>())
}

/// A prefix or one of several.
fn any_of(name: &str, args: &[Value], test: impl Fn(&str) -> bool) -> Result {
    let (what,): (Value,) = from_args(args)?;
    let is_tuple = listed(&what) == Some(Listed::Tuple);
    if let Some(what) = what.as_str() {
        return Ok(Value::from(test(what)));
    }
    if !is_tuple {
        return Err(refused(format!("{name}: the argument is {}", what.kind())));
    }
    for one in what.try_iter()? {
        let one = one
            .as_str()
            .ok_or_else(|| refused(format!("{name}: no string")))?;
        if test(one) {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

fn of_string(text: &str, name: &str, args: &[Value]) -> Option<Result> {
    let no_args = || from_args::<()>(args);
    let tuple = |parts: [&str; 3]| Elements::value(Listed::Tuple, parts.map(Value::from).to_vec());
    let one_string = || from_args::<(&str,)>(args).map(|(one,)| one);
    let separator = || {
        one_string().and_then(|by| match by.is_empty() {
            true => Err(refused("an empty separator")),
            false => Ok(by),
        })
    };
    Some(match name {
        "upper" => no_args().map(|()| text.to_uppercase().into()),
        "lower" => no_args().map(|()| text.to_lowercase().into()),
        "title" => no_args().and_then(|()| title(text)),
        "capitalize" => no_args().map(|()| capitalized(text).into()),
        "strip" | "lstrip" | "rstrip" => {
            from_args(args).and_then(|(characters,): (Option<Value>,)| {
                let characters = characters.filter(|characters| !characters.is_none());
                let Some(characters) = characters else {
                    return Ok(stripped(text, name, None).into());
                };
                let characters = characters.as_str();
                let characters = characters.ok_or_else(|| refused(format!("{name}: no string")))?;
                Ok(stripped(text, name, Some(characters)).into())
            })
        }
        "split" | "rsplit" => split(text, name, args),
        "splitlines" => split_lines(text, args),
        "join" => from_args(args).and_then(|(parts,): (Value,)| {
            let parts = iterated(&parts)?;
            let parts: Option<Vec<String>> = parts
                .try_iter()?
                .map(|part| part.as_str().map(str::to_owned))
                .collect();
            let parts = parts.ok_or_else(|| refused("join: an element is no string"))?;
            Ok(parts.join(text).into())
        }),
        "replace" => from_args(args).and_then(|(from, to, count): (&str, &str, Option<i64>)| {
            replaced(text, from, to, count)
        }),
        "startswith" => any_of(name, args, |prefix| text.starts_with(prefix)),
        "endswith" => any_of(name, args, |suffix| text.ends_with(suffix)),
        "find" | "rfind" => found(text, name, args).map(|at| match at {
            Some(at) => Value::from(at),
            None => Value::from(-1),
        }),
        "index" | "rindex" => found(text, name, args).and_then(|at| {
            at.map(Value::from)
                .ok_or_else(|| refused("substring not found"))
        }),
        "count" => from_args(args).map(|(what, start, end): (&str, Option<i64>, Option<i64>)| {
            match part(text, start, end) {
                None => Value::from(0),
                Some((part, _)) if what.is_empty() => Value::from(part.chars().count() + 1),
                Some((part, _)) => Value::from(part.matches(what).count()),
            }
        }),
        "partition" => separator().map(|by| match text.split_once(by) {
            Some((before, after)) => tuple([before, by, after]),
            None => tuple([text, "", ""]),
        }),
        "rpartition" => separator().map(|by| match text.rsplit_once(by) {
            Some((before, after)) => tuple([before, by, after]),
            None => tuple(["", "", text]),
        }),
        "removeprefix" => one_string().map(|by| text.strip_prefix(by).unwrap_or(text).into()),
        "removesuffix" => one_string().map(|by| text.strip_suffix(by).unwrap_or(text).into()),
        "zfill" => from_args(args).and_then(|(wanted,): (i64,)| {
            let (sign, digits) = match text.strip_prefix(['+', '-']) {
                Some(digits) => (&text[..1], digits),
                None => ("", text),
            };
            let zeros = width(wanted)?.saturating_sub(text.chars().count());
            Ok(format!("{sign}{}{digits}", "0".repeat(zeros)).into())
        }),
        "ljust" | "rjust" | "center" => padded(text, name, args),
        "isdigit" | "isdecimal" | "isnumeric" => no_args().and_then(|()| {
            all(text, |c| match c.is_ascii() {
                true => Ok(c.is_ascii_digit()),
                false if c.is_numeric() || name == "isnumeric" => Err(undecided(name, c)),
                false => Ok(false),
            })
        }),
        "isalpha" => no_args().and_then(|()| all(text, |c| is_letter(name, c))),
        "isalnum" => no_args().and_then(|()| {
            all(text, |c| match c.is_numeric() {
                true if c.is_ascii() => Ok(true),
                true => Err(undecided(name, c)),
                false => is_letter(name, c),
            })
        }),
        "isspace" => no_args().and_then(|()| all(text, |c| Ok(is_space(c)))),
        "isascii" => no_args().map(|()| text.is_ascii().into()),
        "isupper" | "islower" => no_args().map(|()| {
            let is = |c: char| {
                if name == "isupper" {
                    c.is_uppercase()
                } else {
                    c.is_lowercase()
                }
            };
            let mut cased = text
                .chars()
                .filter(|c| c.is_uppercase() || c.is_lowercase())
                .peekable();
            (cased.peek().is_some() && cased.all(is)).into()
        }),
        "format" => formatted(text, args),
        _ => return None,
    })
}

fn undecided(name: &str, character: char) -> Error {
    refused(format!(
        "{name} of the character {character:?} is not supported"
    ))
}

/// Whether a string has characters, and all are of a kind.
fn all(text: &str, is: impl Fn(char) -> Result<bool>) -> Result {
    for character in text.chars() {
        if !is(character)? {
            return Ok(Value::from(false));
        }
    }
    Ok(Value::from(!text.is_empty()))
}

/// Whether Python says that a character is a letter.
fn is_letter(name: &str, c: char) -> Result<bool> {
    let is_known = c.is_ascii()
        || !c.is_alphabetic()
        || ('\u{c0}'..'\u{2b0}').contains(&c)
        || ('\u{400}'..'\u{482}').contains(&c)
        || ('\u{4e00}'..='\u{9fff}').contains(&c)
        || ('\u{ac00}'..='\u{d7a3}').contains(&c);
    match is_known {
        true => Ok(c.is_alphabetic()),
        false => Err(undecided(name, c)),
    }
}

pub(super) fn capitalized(text: &str) -> String {
    let Some(first) = text.chars().next() else {
        return String::new();
    };
    // Letters that are two, and those whose upper case is several, have a title case.
    let first = match first {
        '\u{1c4}'..='\u{1c6}' => '\u{1c5}',
        '\u{1c7}'..='\u{1c9}' => '\u{1c8}',
        '\u{1ca}'..='\u{1cc}' => '\u{1cb}',
        '\u{1f1}'..='\u{1f3}' => '\u{1f2}',
        other => other,
    };
    let is_title = matches!(first, '\u{1c5}' | '\u{1c8}' | '\u{1cb}' | '\u{1f2}');
    let upper = (!is_title).then(|| first.to_uppercase());
    let mut upper = upper.into_iter().flatten().chain(is_title.then_some(first));
    let mut out: String = upper.next().into_iter().collect();
    out.extend(upper.flat_map(char::to_lowercase));
    // A letter's lower case depends on those around it.
    let lower = text.to_lowercase();
    out.extend(lower.chars().skip(first.to_lowercase().count()));
    out
}

fn title(text: &str) -> Result {
    if !text.is_ascii() {
        return Err(refused(
            "title of other than ASCII characters is not supported",
        ));
    }
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for character in text.chars() {
        out.push(match in_word {
            true => character.to_ascii_lowercase(),
            false => character.to_ascii_uppercase(),
        });
        in_word = character.is_ascii_alphabetic();
    }
    Ok(out.into())
}

fn split(text: &str, name: &str, args: &[Value]) -> Result {
    let (by, kwargs): (Option<Value>, Kwargs) = match args {
        [by, count, rest @ ..] if rest.is_empty() && count.is_kwargs() => {
            (Some(by.clone()), Kwargs::try_from(count.clone())?)
        }
        [only] if only.is_kwargs() => (None, Kwargs::try_from(only.clone())?),
        _ => {
            let (by, count): (Option<Value>, Option<i64>) = from_args(args)?;
            let count = count.map(|count| ("maxsplit", Value::from(count)));
            (by, Kwargs::from_iter(count))
        }
    };
    let by_name: Option<Value> = kwargs.get("sep")?;
    let count: Option<i64> = kwargs.get("maxsplit")?;
    kwargs.assert_all_used()?;
    let by = by.or(by_name).filter(|by| !by.is_none());
    let limit = count
        .filter(|&count| count >= 0)
        .map_or(usize::MAX, |count| count as usize);

    let mut parts: Vec<String> = Vec::new();
    if let Some(by) = by {
        let by = by.as_str().filter(|by| !by.is_empty());
        let by = by.ok_or_else(|| refused("a separator is empty, or no string"))?;
        if name == "rsplit" {
            parts.extend(text.rsplitn(limit.saturating_add(1), by).map(str::to_owned));
            parts.reverse();
        } else {
            parts.extend(text.splitn(limit.saturating_add(1), by).map(str::to_owned));
        }
        return Ok(strings(parts));
    }
    if name == "rsplit" && count.is_some() {
        return Err(refused(
            "rsplit by white space with a limit is not supported",
        ));
    }
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if parts.len() == limit {
            parts.push(rest.trim_end_matches(is_space).to_owned());
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        parts.push(rest[..end].to_owned());
        rest = rest[end..].trim_start_matches(is_space);
    }
    Ok(strings(parts))
}

fn split_lines(text: &str, args: &[Value]) -> Result {
    let (keep,): (Option<bool>,) = from_args(args)?;
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(is_end).unwrap_or(rest.len());
        let behind = &rest[end..];
        let len = match behind.starts_with("\r\n") {
            true => 2,
            false => behind.chars().next().map_or(0, char::len_utf8),
        };
        let kept = if keep == Some(true) { end + len } else { end };
        lines.push(rest[..kept].to_owned());
        rest = &rest[end + len..];
    }
    Ok(strings(lines))
}

pub(super) fn replaced(text: &str, from: &str, to: &str, count: Option<i64>) -> Result {
    Ok(match count.filter(|&count| count >= 0) {
        Some(count) => text.replacen(from, to, count as usize).into(),
        None => text.replace(from, to).into(),
    })
}

/// The width of a padded string.
pub(super) fn width(width: i64) -> Result<usize> {
    if width > MAX_WIDTH {
        let why = format!("a width of {width}; at most {MAX_WIDTH} are supported");
        return Err(refused(why));
    }
    Ok(width.max(0) as usize)
}

fn padded(text: &str, name: &str, args: &[Value]) -> Result {
    let (wanted, fill): (i64, Option<&str>) = from_args(args)?;
    let fill = fill.unwrap_or(" ");
    if fill.chars().count() != 1 {
        return Err(refused(format!("{name}: the fill is not one character")));
    }
    let wanted = width(wanted)?;
    let missing = wanted.saturating_sub(text.chars().count());
    let left = match name {
        "ljust" => 0,
        "rjust" => missing,
        // As str.center of CPython.
        _ => missing / 2 + (missing & wanted & 1),
    };
    let out = format!("{}{text}{}", fill.repeat(left), fill.repeat(missing - left));
    Ok(out.into())
}

/// `str.format` with fields that have no format specification.
fn formatted(template: &str, args: &[Value]) -> Result {
    let (args, kwargs): (&[Value], Kwargs) = match args {
        [rest @ .., last] if last.is_kwargs() => (rest, Kwargs::try_from(last.clone())?),
        _ => (args, Kwargs::from_iter(None::<(String, Value)>)),
    };
    let mut out = String::new();
    let mut rest = template;
    let mut next = 0;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let brace = &rest[at..];
        if brace.starts_with("{{") || brace.starts_with("}}") {
            out.push_str(&brace[..1]);
            rest = &brace[2..];
            continue;
        }
        let end = brace.find('}').filter(|_| brace.starts_with('{'));
        let end = end.ok_or_else(|| refused("format: a brace that is not closed or opened"))?;
        let field = &brace[1..end];
        let value = if field.is_empty() {
            next += 1;
            args.get(next - 1).cloned()
        } else if let Ok(index) = field.parse::<usize>() {
            args.get(index).cloned()
        } else if field.chars().all(super::is_name) {
            Some(kwargs.get::<Value>(field)?)
        } else {
            return Err(refused(format!(
                "format: the field {field:?} is not supported"
            )));
        };
        let value = value.ok_or_else(|| refused("format: an argument is missing"))?;
        out.push_str(&text(&value)?);
        rest = &brace[end + 1..];
    }
    out.push_str(rest);
    Ok(out.into())
}
