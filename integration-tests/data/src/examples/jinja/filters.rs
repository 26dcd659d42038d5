//! Filters, tests and functions of jinja2.

use std::cmp::Ordering;

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error, State};

use super::numbers::{float, from_integer, integer};
use super::operators::{add, compare, equal, iterated};
use super::percent::percent_format;
use super::python::{Elements, Listed, is_namespace, is_number, listed, text, to_json};
use super::{methods, operators, refused};

type Result<T = Value> = std::result::Result<T, Error>;

/// Longest `range`, as in jinja2's sandbox.
const MAX_RANGE: i128 = 100_000;

pub(super) fn add_to(environment: &mut Environment<'static>) {
    add_functions(environment);
    add_tests(environment);

    for name in ["default", "d"] {
        environment.add_filter(name, default);
    }
    for name in ["length", "count"] {
        environment.add_filter(name, length);
    }
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| match value.is_safe() {
        true => Ok(value.clone()),
        false => text(value).map(Value::from),
    });
    environment.add_filter("safe", |value: &Value| {
        text(value).map(Value::from_safe_string)
    });
    environment.add_filter("upper", |value: &Value| {
        Ok::<_, Error>(text(value)?.to_uppercase())
    });
    environment.add_filter("lower", |value: &Value| {
        Ok::<_, Error>(text(value)?.to_lowercase())
    });
    environment.add_filter("capitalize", |value: &Value| {
        Ok::<_, Error>(methods::capitalized(&text(value)?))
    });
    environment.add_filter("title", title);
    environment.add_filter("trim", trim);
    environment.add_filter("replace", replace);
    environment.add_filter("wordcount", word_count);
    environment.add_filter("indent", indent);
    environment.add_filter("center", center);
    environment.add_filter("format", |template: &Value, values: Rest<Value>| {
        let template = Value::from(text(template)?);
        let values = Elements::value(Listed::Tuple, values.to_vec());
        percent_format(&template, &values)
    });
    environment.add_filter("urlencode", url_encode);

    environment.add_filter("int", int);
    environment.add_filter("float", to_float);
    environment.add_filter("abs", abs);
    environment.add_filter("round", round);
    environment.add_filter("sum", sum);

    environment.add_filter("join", join);
    environment.add_filter("list", |value: &Value| {
        Ok::<_, Error>(Value::from(elements(value)?))
    });
    environment.add_filter("first", |value: &Value| {
        Ok::<_, Error>(elements(value)?.into_iter().next().unwrap_or_default())
    });
    environment.add_filter("last", |value: &Value| {
        Ok::<_, Error>(reversible(value)?.pop().unwrap_or_default())
    });
    environment.add_filter("reverse", reverse);
    environment.add_filter("min", |value: &Value, args: Rest<Value>| {
        extreme(value, &args, Ordering::Less)
    });
    environment.add_filter("max", |value: &Value, args: Rest<Value>| {
        extreme(value, &args, Ordering::Greater)
    });
    environment.add_filter("sort", sort);
    environment.add_filter("unique", unique);
    environment.add_filter("dictsort", sort_dictionary);
    environment.add_filter("items", items);
    environment.add_filter("map", map);
    environment.add_filter(
        "select",
        |state: &State, value: &Value, args: Rest<Value>| filtered(state, value, None, &args, true),
    );
    environment.add_filter(
        "reject",
        |state: &State, value: &Value, args: Rest<Value>| {
            filtered(state, value, None, &args, false)
        },
    );
    environment.add_filter(
        "selectattr",
        |state: &State, value: &Value, name: String, args: Rest<Value>| {
            filtered(state, value, Some(&name), &args, true)
        },
    );
    environment.add_filter(
        "rejectattr",
        |state: &State, value: &Value, name: String, args: Rest<Value>| {
            filtered(state, value, Some(&name), &args, false)
        },
    );
}

fn add_functions(environment: &mut Environment<'static>) {
    environment.add_function("namespace", minijinja::functions::namespace);
    environment.add_function("dict", |entries: Kwargs| -> Result {
        let names: Vec<String> = entries.args().map(str::to_owned).collect();
        let entry = |name: String| {
            let value = entries.get::<Value>(&name)?;
            Ok((name, value))
        };
        let entries: Result<Vec<(String, Value)>> = names.into_iter().map(entry).collect();
        Ok(entries?.into_iter().collect())
    });
    environment.add_function("range", range);
}

fn range(args: Rest<Value>) -> Result {
    let bounds: Option<Vec<i128>> = args.iter().map(integer).collect();
    let bounds = bounds.ok_or_else(|| refused("range: a bound is no integer"))?;
    let [start, stop, step] = match bounds[..] {
        [stop] => [0, stop, 1],
        [start, stop] => [start, stop, 1],
        [start, stop, step] if step != 0 => [start, stop, step],
        _ => {
            return Err(refused(
                "range: one to three bounds, and a step that is not zero",
            ));
        }
    };
    let len = match step > 0 {
        true => (stop - start + step - 1) / step,
        false => (start - stop - step - 1) / -step,
    };
    if len > MAX_RANGE {
        return Err(refused(format!("a range of more than {MAX_RANGE}")));
    }
    let numbers = (0..len.max(0)).map(|at| from_integer(start + at * step));
    Ok(Elements::value(Listed::Range, numbers.collect()))
}

fn add_tests(environment: &mut Environment<'static>) {
    environment.add_test("defined", |value: &Value| !value.is_undefined());
    environment.add_test("undefined", Value::is_undefined);
    environment.add_test("none", Value::is_none);
    environment.add_test("boolean", |value: &Value| value.kind() == ValueKind::Bool);
    environment.add_test("true", |value: &Value| {
        value.kind() == ValueKind::Bool && value.is_true()
    });
    environment.add_test("false", |value: &Value| {
        value.kind() == ValueKind::Bool && !value.is_true()
    });
    environment.add_test("string", |value: &Value| value.as_str().is_some());
    environment.add_test("number", is_number);
    environment.add_test("integer", |value: &Value| value.is_integer());
    environment.add_test("float", |value: &Value| {
        value.is_number() && !value.is_integer()
    });
    environment.add_test("mapping", |value: &Value| {
        value.kind() == ValueKind::Map && !is_namespace(value)
    });
    environment.add_test("sequence", |value: &Value| match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Map => true,
        ValueKind::Seq | ValueKind::Iterable => is_indexed(value),
        _ => false,
    });
    environment.add_test("iterable", |value: &Value| iterated(value).is_ok());
    environment.add_test("lower", |value: &Value| is_cased(value, char::is_lowercase));
    environment.add_test("upper", |value: &Value| is_cased(value, char::is_uppercase));
    environment.add_test("odd", |value: &Value| {
        Ok::<_, Error>(remainder(value, 2)? == 1.0)
    });
    environment.add_test("even", |value: &Value| {
        Ok::<_, Error>(remainder(value, 2)? == 0.0)
    });
    environment.add_test("divisibleby", |value: &Value, by: i128| match by {
        0 => Err(refused("division by zero")),
        _ => Ok(remainder(value, by)? == 0.0),
    });
    for name in ["eq", "equalto"] {
        environment.add_test(name, equal);
    }
    environment.add_test("ne", |a: &Value, b: &Value| !equal(a, b));
    for (names, of) in [
        (["lt", "lessthan"], Ordering::is_lt as fn(Ordering) -> bool),
        (["le", "le"], Ordering::is_le),
        (["gt", "greaterthan"], Ordering::is_gt),
        (["ge", "ge"], Ordering::is_ge),
    ] {
        for name in names {
            environment.add_test(name, move |a: &Value, b: &Value| {
                Ok::<_, Error>(compare(name, a, b)?.is_some_and(of))
            });
        }
    }
    environment.add_test("in", |value: &Value, of: &Value| {
        operators::contains(of, value)
    });
}

/// The arguments of a filter by its parameters, as positions or as names.
fn bound<const N: usize>(parameters: [&str; N], args: &[Value]) -> Result<[Option<Value>; N]> {
    let (args, named) = match args.split_last() {
        Some((last, rest)) if last.is_kwargs() => (rest, Some(Kwargs::try_from(last.clone())?)),
        _ => (args, None),
    };
    if args.len() > N {
        return Err(refused("a filter has too many arguments"));
    }
    let mut bound: [Option<Value>; N] = std::array::from_fn(|index| args.get(index).cloned());
    if let Some(named) = named {
        for (slot, name) in bound.iter_mut().zip(parameters) {
            if named.has(name) {
                *slot = Some(named.get(name)?);
            }
        }
        named.assert_all_used()?;
    }
    Ok(bound)
}

/// Whether an argument is there and true.
fn is_set(argument: Option<&Value>) -> bool {
    argument.is_some_and(Value::is_true)
}

/// An argument that is a string.
fn string_of(argument: Option<&Value>) -> Result<Option<&str>> {
    match argument.filter(|argument| !argument.is_none()) {
        None => Ok(None),
        Some(argument) => argument
            .as_str()
            .map(Some)
            .ok_or_else(|| refused("an argument is no string")),
    }
}

/// Whether elements have indices.
fn is_indexed(value: &Value) -> bool {
    matches!(listed(value), None | Some(Listed::Tuple | Listed::Range))
}

fn is_cased(value: &Value, is: fn(char) -> bool) -> Result<bool> {
    let text = text(value)?;
    let mut cased = text
        .chars()
        .filter(|c| c.is_uppercase() || c.is_lowercase())
        .peekable();
    Ok(cased.peek().is_some() && cased.all(is))
}

fn remainder(value: &Value, by: i128) -> Result<f64> {
    match integer(value) {
        Some(value) => Ok(value.rem_euclid(by.abs()) as f64),
        None if is_number(value) => Ok(float(value)?.rem_euclid(by.abs() as f64)),
        None => Err(refused(format!("a {} has no remainder", value.kind()))),
    }
}

fn default(value: &Value, args: Rest<Value>) -> Result {
    let [other, boolean] = bound(["default_value", "boolean"], &args)?;
    let is_absent = value.is_undefined() || is_set(boolean.as_ref()) && !value.is_true();
    Ok(match is_absent {
        true => other.unwrap_or_else(|| Value::from("")),
        false => value.clone(),
    })
}

fn length(value: &Value) -> Result<usize> {
    if let Some(text) = value.as_str() {
        return Ok(text.chars().count());
    }
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        ValueKind::Map | ValueKind::Seq | ValueKind::Iterable
            if listed(value) != Some(Listed::Generator) =>
        {
            let len = value.len();
            Ok(len.unwrap_or_else(|| value.try_iter().map_or(0, Iterator::count)))
        }
        kind => Err(refused(format!("a {kind} has no length"))),
    }
}

fn elements(value: &Value) -> Result<Vec<Value>> {
    Ok(iterated(value)?.try_iter()?.collect())
}

/// The elements of what Python reverses.
fn reversible(value: &Value) -> Result<Vec<Value>> {
    match listed(value) {
        Some(Listed::Generator) => Err(refused(
            "what a filter makes is reversed: make a list of it",
        )),
        _ => elements(value),
    }
}

fn reverse(value: &Value) -> Result {
    if let Some(text) = value.as_str() {
        return Ok(Value::from(text.chars().rev().collect::<String>()));
    }
    let elements = elements(value)?.into_iter().rev();
    Ok(Elements::value(Listed::Generator, elements.collect()))
}

fn title(value: &Value) -> Result<String> {
    let text = text(value)?;
    let is_between = |c: char| c == '-' || methods::is_space(c) || "({[<".contains(c);
    let mut out = String::with_capacity(text.len());
    for word in text.split_inclusive(is_between) {
        let mut characters = word.chars();
        out.extend(characters.next().into_iter().flat_map(char::to_uppercase));
        out.push_str(&characters.as_str().to_lowercase());
    }
    Ok(out)
}

fn trim(value: &Value, characters: Rest<Value>) -> Result {
    methods::call(&Value::from(text(value)?), "strip", &characters)
}

fn replace(value: &Value, from: &Value, to: &Value, count: Option<i64>) -> Result {
    methods::replaced(&text(value)?, &text(from)?, &text(to)?, count)
}

fn word_count(value: &Value) -> Result<usize> {
    let text = text(value)?;
    if !text.is_ascii() {
        return Err(refused(
            "wordcount of other than ASCII characters is not supported",
        ));
    }
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    Ok(words.filter(|word| !word.is_empty()).count())
}

fn indent(value: &Value, args: Rest<Value>) -> Result<String> {
    let [width, first, blank] = bound(["width", "first", "blank"], &args)?;
    let width = width.unwrap_or_else(|| Value::from(4));
    let by = match (width.as_str(), integer(&width)) {
        (Some(by), _) => by.to_owned(),
        (None, Some(width)) => " ".repeat(methods::width(width.clamp(0, i64::MAX.into()) as i64)?),
        _ => {
            return Err(refused(
                "indent: the width is neither a number nor a string",
            ));
        }
    };
    let text = value
        .as_str()
        .ok_or_else(|| refused(format!("indent of {}", value.kind())))?;
    if text.contains(|c| "\r\u{b}\u{c}\u{1c}\u{1d}\u{1e}\u{85}\u{2028}\u{2029}".contains(c)) {
        return Err(refused(
            "indent of lines that do not end with \\n is not supported",
        ));
    }
    let mut lines: Vec<&str> = text.split('\n').collect();
    // jinja2 adds a line feed, and splits without the empty last line.
    if lines.len() > 1 && lines.last() == Some(&"") {
        lines.pop();
        lines.push("");
    }
    let mut out = String::new();
    for (index, line) in lines.iter().enumerate() {
        let is_indented = match index {
            0 => is_set(first.as_ref()),
            _ => is_set(blank.as_ref()) || !line.is_empty(),
        };
        out.push_str(if index > 0 { "\n" } else { "" });
        out.push_str(if is_indented { &by } else { "" });
        out.push_str(line);
    }
    Ok(out)
}

fn center(value: &Value, width: Option<i64>) -> Result {
    let text = Value::from(text(value)?);
    methods::call(&text, "center", &[Value::from(width.unwrap_or(80))])
}

/// Percent encoding, which keeps `/` in strings.
fn url_encode(value: &Value) -> Result<String> {
    let encoded = |text: &str, is_query: bool| {
        let mut out = String::new();
        for byte in text.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                    out.push(char::from(byte));
                }
                b'/' if !is_query => out.push('/'),
                b' ' if is_query => out.push('+'),
                _ => out.push_str(&format!("%{byte:02X}")),
            }
        }
        out
    };
    let pairs = match value.kind() {
        ValueKind::Map => methods::pairs(value)?,
        ValueKind::Seq | ValueKind::Iterable => elements(value)?,
        _ => return Ok(encoded(&text(value)?, false)),
    };
    let pair = |pair: Value| match &elements(&pair)?[..] {
        [key, value] => Ok(format!(
            "{}={}",
            encoded(&text(key)?, true),
            encoded(&text(value)?, true)
        )),
        _ => Err(refused("urlencode: an element is no pair")),
    };
    let pairs: Result<Vec<String>> = pairs.into_iter().map(pair).collect();
    Ok(pairs?.join("&"))
}

/// A string as Python's `int` and `float` read it.
fn number_of(text: &str) -> Option<&str> {
    let text = text.trim_matches(methods::is_space);
    let is_plain = text
        .chars()
        .all(|c| c.is_ascii_digit() || "+-.eE".contains(c));
    (is_plain && text.chars().any(|c| c.is_ascii_digit())).then_some(text)
}

fn int(value: &Value, default: Option<Value>) -> Result {
    let default = default.unwrap_or_else(|| Value::from(0));
    if let Some(integer) = integer(value) {
        return Ok(from_integer(integer));
    }
    let number = if let Some(text) = value.as_str() {
        if text.contains('_') || !text.is_ascii() || text.to_ascii_lowercase().contains("inf") {
            return Err(refused(format!(
                "int of the string {text:?} is not supported"
            )));
        }
        let number = number_of(text);
        if let Some(integer) = number.and_then(|text| text.parse::<i128>().ok()) {
            return Ok(from_integer(integer));
        }
        number.and_then(|text| text.parse::<f64>().ok())
    } else if value.is_number() {
        Some(float(value)?)
    } else if value.is_undefined() {
        return Err(refused("int of undefined"));
    } else {
        None
    };
    match number {
        Some(number) if number.abs() < 1e30 => Ok(from_integer(number.trunc() as i128)),
        Some(_) => Err(refused("int of a number that is too large")),
        None => Ok(default),
    }
}

fn to_float(value: &Value, default: Option<Value>) -> Result {
    let default = default.unwrap_or_else(|| Value::from(0.0));
    if let Some(text) = value.as_str() {
        let lower = text.to_ascii_lowercase();
        if text.contains('_') || !text.is_ascii() || lower.contains("inf") || lower.contains("nan")
        {
            return Err(refused(format!(
                "float of the string {text:?} is not supported"
            )));
        }
        let number = number_of(text).and_then(|text| text.parse::<f64>().ok());
        return Ok(number.map_or(default, Value::from));
    }
    match value.kind() {
        ValueKind::Undefined => Err(refused("float of undefined")),
        _ if is_number(value) => Ok(Value::from(float(value)?)),
        _ => Ok(default),
    }
}

fn abs(value: &Value) -> Result {
    match integer(value) {
        Some(integer) => Ok(from_integer(integer.abs())),
        None if is_number(value) => Ok(Value::from(float(value)?.abs())),
        None => Err(refused(format!("abs of {}", value.kind()))),
    }
}

fn round(value: &Value, args: Rest<Value>) -> Result {
    let [precision, method] = bound(["precision", "method"], &args)?;
    let precision = precision.map_or(Some(0), |precision| integer(&precision));
    let precision = precision.filter(|precision| (0..=15).contains(precision));
    let precision =
        precision.ok_or_else(|| refused("round: a precision of 0 to 15 is supported"))?;
    let method = string_of(method.as_ref())?;
    if !is_number(value) {
        return Err(refused(format!("round of {}", value.kind())));
    }
    let number = float(value)?;
    if !number.is_finite() {
        return Err(refused(
            "round of a number that is not finite is not supported",
        ));
    }
    let scale = 10_f64.powi(precision as i32);
    match method {
        None | Some("common") => match integer(value) {
            Some(integer) => Ok(from_integer(integer)),
            // The nearest decimal, and the even one of two.
            None => Ok(Value::from(
                format!("{number:.*}", precision as usize)
                    .parse::<f64>()
                    .unwrap_or(number),
            )),
        },
        // Python's are integers, of which zero has no sign.
        Some("ceil") => Ok(Value::from(((number * scale).ceil() + 0.0) / scale)),
        Some("floor") => Ok(Value::from(((number * scale).floor() + 0.0) / scale)),
        Some(other) => Err(refused(format!("round: no method {other:?}"))),
    }
}

/// An attribute with dots, as filters have it.
fn path(value: &Value, path: &str) -> Result {
    let mut found = value.clone();
    for part in path.split('.') {
        found = match part.parse::<i64>() {
            Ok(index) => operators::item(&found, &Value::from(index))?,
            Err(_) => operators::item(&found, &Value::from(part))?,
        };
    }
    Ok(found)
}

fn sum(value: &Value, args: Rest<Value>) -> Result {
    let [attribute, start] = bound(["attribute", "start"], &args)?;
    let attribute = string_of(attribute.as_ref())?;
    let mut sum = start.unwrap_or_else(|| Value::from(0));
    if sum.as_str().is_some() {
        return Err(refused("sum of strings"));
    }
    let elements = elements(value)?;
    if elements
        .iter()
        .any(|one| one.is_number() && !one.is_integer())
    {
        return Err(refused(
            "sum of floats is not supported: Python rounds it otherwise by version",
        ));
    }
    for element in elements {
        let one = match attribute {
            Some(attribute) => path(&element, attribute)?,
            None => element,
        };
        sum = add(&sum, &one)?;
    }
    Ok(sum)
}

fn join(value: &Value, args: Rest<Value>) -> Result<String> {
    let [separator, attribute] = bound(["d", "attribute"], &args)?;
    let separator = separator.map_or(Ok(String::new()), |by| text(&by))?;
    let attribute = string_of(attribute.as_ref())?;
    let part = |element: &Value| match attribute {
        Some(attribute) => text(&path(element, attribute)?),
        None => text(element),
    };
    let parts: Result<Vec<String>> = elements(value)?.iter().map(part).collect();
    Ok(parts?.join(&separator))
}

/// How elements are ordered.
struct Order {
    case_sensitive: bool,
    attribute: Option<String>,
}

impl Order {
    fn new(case_sensitive: Option<&Value>, attribute: Option<&Value>) -> Result<Self> {
        Ok(Self {
            case_sensitive: is_set(case_sensitive),
            attribute: string_of(attribute)?.map(str::to_owned),
        })
    }

    fn key(&self, element: &Value) -> Result {
        let value = match &self.attribute {
            Some(path) if path.contains(',') => {
                return Err(refused("several attributes are not supported"));
            }
            Some(attribute) => path(element, attribute)?,
            None => element.clone(),
        };
        Ok(match value.as_str() {
            Some(text) if !self.case_sensitive => Value::from(text.to_lowercase()),
            _ => value,
        })
    }
}

fn extreme(value: &Value, args: &[Value], wanted: Ordering) -> Result {
    let [case_sensitive, attribute] = bound(["case_sensitive", "attribute"], args)?;
    let order = Order::new(case_sensitive.as_ref(), attribute.as_ref())?;
    let mut best: Option<(Value, Value)> = None;
    for element in elements(value)? {
        let key = order.key(&element)?;
        let is_better = match &best {
            None => true,
            Some((_, of_best)) => compare("<", &key, of_best)? == Some(wanted),
        };
        if is_better {
            best = Some((element, key));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(element, _)| element))
}

/// Sorts by keys, equal ones in their order.
fn sorted(mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<Value>> {
    // All pairs that Python may compare.
    for pair in keyed.windows(2) {
        compare("<", &pair[0].0, &pair[1].0)?;
    }
    let mut failed = None;
    keyed.sort_by(|(one, _), (other, _)| {
        let (one, other) = if reverse { (other, one) } else { (one, other) };
        compare("<", one, other)
            .unwrap_or_else(|error| {
                failed = Some(error);
                None
            })
            .unwrap_or(Ordering::Equal)
    });
    match failed {
        Some(error) => Err(error),
        None => Ok(keyed.into_iter().map(|(_, element)| element).collect()),
    }
}

fn sort(value: &Value, args: Rest<Value>) -> Result {
    let [reverse, case_sensitive, attribute] =
        bound(["reverse", "case_sensitive", "attribute"], &args)?;
    let order = Order::new(case_sensitive.as_ref(), attribute.as_ref())?;
    let keyed = elements(value)?
        .into_iter()
        .map(|one| Ok((order.key(&one)?, one)));
    let keyed: Result<Vec<_>> = keyed.collect();
    Ok(Value::from(sorted(keyed?, is_set(reverse.as_ref()))?))
}

fn unique(value: &Value, args: Rest<Value>) -> Result {
    let [case_sensitive, attribute] = bound(["case_sensitive", "attribute"], &args)?;
    let order = Order::new(case_sensitive.as_ref(), attribute.as_ref())?;
    let mut keys: Vec<Value> = Vec::new();
    let mut kept = Vec::new();
    for element in elements(value)? {
        let key = order.key(&element)?;
        if matches!(
            key.kind(),
            ValueKind::Map | ValueKind::Seq | ValueKind::Iterable
        ) {
            return Err(refused("unique of lists or dictionaries"));
        }
        if !keys.iter().any(|one| equal(one, &key)) {
            keys.push(key);
            kept.push(element);
        }
    }
    Ok(Elements::value(Listed::Generator, kept))
}

fn sort_dictionary(value: &Value, args: Rest<Value>) -> Result {
    let [case_sensitive, by, reverse] = bound(["case_sensitive", "by", "reverse"], &args)?;
    let place = match string_of(by.as_ref())? {
        None | Some("key") => 0,
        Some("value") => 1,
        Some(other) => return Err(refused(format!("dictsort by {other:?}"))),
    };
    if value.kind() != ValueKind::Map {
        return Err(refused(format!("dictsort of {}", value.kind())));
    }
    let order = Order::new(case_sensitive.as_ref(), None)?;
    let keyed = methods::pairs(value)?
        .into_iter()
        .map(|pair| Ok((order.key(&pair.get_item_by_index(place)?)?, pair)));
    let keyed: Result<Vec<_>> = keyed.collect();
    Ok(Value::from(sorted(keyed?, is_set(reverse.as_ref()))?))
}

fn items(value: &Value) -> Result {
    match value.kind() {
        ValueKind::Undefined => Ok(Elements::value(Listed::Generator, Vec::new())),
        ValueKind::Map => Ok(Elements::value(Listed::Generator, methods::pairs(value)?)),
        kind => Err(refused(format!("items of {kind}"))),
    }
}

fn map(state: &State, value: &Value, args: Rest<Value>) -> Result {
    let (args, options) = match args.split_last() {
        Some((last, rest)) if last.is_kwargs() => (rest, Kwargs::try_from(last.clone())?),
        _ => (&args[..], Kwargs::from_iter(None::<(String, Value)>)),
    };
    let elements = elements(value)?;
    let mapped: Result<Vec<Value>> = match args {
        [] => {
            let attribute: String = options.get("attribute")?;
            let default: Option<Value> = options.get("default")?;
            options.assert_all_used()?;
            let of = |element: &Value| {
                let found = path(element, &attribute)?;
                Ok(match (&default, found.is_undefined()) {
                    (Some(default), true) => default.clone(),
                    _ => found,
                })
            };
            elements.iter().map(of).collect()
        }
        [name, rest @ ..] => {
            let name = name
                .as_str()
                .ok_or_else(|| refused("map: a filter's name is no string"))?;
            let of = |element: &Value| {
                let mut args = vec![element.clone()];
                args.extend(rest.iter().cloned());
                state.apply_filter(name, &args)
            };
            elements.iter().map(of).collect()
        }
    };
    Ok(Elements::value(Listed::Generator, mapped?))
}

/// The elements that pass a test, or do not.
fn filtered(
    state: &State,
    value: &Value,
    attribute: Option<&str>,
    args: &[Value],
    wanted: bool,
) -> Result {
    let mut kept = Vec::new();
    for element in elements(value)? {
        let tested = match attribute {
            Some(attribute) => path(&element, attribute)?,
            None => element.clone(),
        };
        let passes = match args {
            [] => tested.is_true(),
            [name, rest @ ..] => {
                let name = name
                    .as_str()
                    .ok_or_else(|| refused("a test's name is no string"))?;
                let mut args = vec![tested];
                args.extend(rest.iter().cloned());
                state.perform_test(name, &args)?
            }
        };
        if passes == wanted {
            kept.push(element);
        }
    }
    Ok(Elements::value(Listed::Generator, kept))
}
