//! Python's operators, as filters that [`super::expression`] writes.

use std::cmp::Ordering;

use minijinja::value::{Value, ValueKind};
use minijinja::{Environment, Error};

use super::expression::DICT_METHODS;
use super::numbers::{float, from_integer, integer};
use super::percent::percent_format;
use super::python::{Elements, Listed, is_namespace, is_number, listed, text};
use super::refused;

/// Longest string or list that an operator repeats.
const MAX_REPEATED: usize = 100_000_000;

type Result<T = Value> = std::result::Result<T, Error>;

pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.add_filter("__add", add);
    environment.add_filter("__sub", |a: &Value, b: &Value| {
        arithmetic("-", a, b, i128::checked_sub, |a, b| a - b)
    });
    environment.add_filter("__mul", multiply);
    environment.add_filter("__div", divide);
    environment.add_filter("__floordiv", |a: &Value, b: &Value| {
        let (quotient, _) = floor_divide("//", a, b)?;
        Ok::<_, Error>(quotient)
    });
    environment.add_filter("__mod", modulo);
    environment.add_filter("__pow", power);
    environment.add_filter("__neg", |a: &Value| {
        arithmetic("-", &Value::from(0), a, i128::checked_sub, |_, a| -a)
    });
    environment.add_filter("__pos", |a: &Value| {
        arithmetic("+", &Value::from(0), a, i128::checked_add, |_, a| a)
    });
    environment.add_filter("__concat", concatenate);
    environment.add_filter("__eq", |a: &Value, b: &Value| equal(a, b));
    environment.add_filter("__ne", |a: &Value, b: &Value| !equal(a, b));
    environment.add_filter("__lt", |a: &Value, b: &Value| {
        Ok::<_, Error>(compare("<", a, b)?.is_some_and(Ordering::is_lt))
    });
    environment.add_filter("__le", |a: &Value, b: &Value| {
        Ok::<_, Error>(compare("<=", a, b)?.is_some_and(Ordering::is_le))
    });
    environment.add_filter("__gt", |a: &Value, b: &Value| {
        Ok::<_, Error>(compare(">", a, b)?.is_some_and(Ordering::is_gt))
    });
    environment.add_filter("__ge", |a: &Value, b: &Value| {
        Ok::<_, Error>(compare(">=", a, b)?.is_some_and(Ordering::is_ge))
    });
    environment.add_filter("__in", |a: &Value, b: &Value| contains(b, a));
    environment.add_filter("__not_in", |a: &Value, b: &Value| {
        Ok::<_, Error>(!contains(b, a)?)
    });
    environment.add_filter("__slice", slice);
    environment.add_filter("__item", item);
    environment.add_filter("__attribute", attribute);
    environment.add_filter("__iter", iterated);
    environment.add_filter("__key", key);
    environment.add_filter("__same", |value: Value| value);
    environment.add_filter("__given", |value: &Value| match value.is_undefined() {
        true => Err(refused(
            "an argument of a macro, which has a default for it, is undefined",
        )),
        false => Ok(value.clone()),
    });
    environment.add_filter("__tuple", |items: Vec<Value>| {
        Elements::value(Listed::Tuple, items)
    });
}

/// An error as Python's `TypeError`.
fn unsupported(operator: &str, a: &Value, b: &Value) -> Error {
    refused(format!(
        "{operator} of {} and {}, which Python refuses",
        a.kind(),
        b.kind()
    ))
}

/// Two numbers of one kind.
enum Numbers {
    Integers(i128, i128),
    Floats(f64, f64),
}

fn numbers(operator: &str, a: &Value, b: &Value) -> Result<Numbers> {
    if !is_number(a) || !is_number(b) {
        return Err(unsupported(operator, a, b));
    }
    match (integer(a), integer(b)) {
        (Some(a), Some(b)) => Ok(Numbers::Integers(a, b)),
        _ => Ok(Numbers::Floats(float(a)?, float(b)?)),
    }
}

fn arithmetic(
    operator: &str,
    a: &Value,
    b: &Value,
    of_integers: fn(i128, i128) -> Option<i128>,
    of_floats: fn(f64, f64) -> f64,
) -> Result {
    match numbers(operator, a, b)? {
        Numbers::Integers(a, b) => of_integers(a, b).map(from_integer).ok_or_else(too_large),
        Numbers::Floats(a, b) => Ok(Value::from(of_floats(a, b))),
    }
}

fn too_large() -> Error {
    refused("an integer of more than 127 bits")
}

/// Whether a value is a list or a tuple, and which.
fn sequence(value: &Value) -> Option<Option<Listed>> {
    let listed = listed(value);
    let is_sequence = matches!(listed, None | Some(Listed::Tuple));
    (matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) && is_sequence).then_some(listed)
}

fn of_sequence(listed: Option<Listed>, elements: Vec<Value>) -> Value {
    match listed {
        Some(listed) => Elements::value(listed, elements),
        None => Value::from(elements),
    }
}

pub(super) fn add(a: &Value, b: &Value) -> Result {
    if let (Some(one), Some(other)) = (a.as_str(), b.as_str()) {
        if a.is_safe() || b.is_safe() {
            let plain = if a.is_safe() { other } else { one };
            if a.is_safe() != b.is_safe() && plain.contains(['&', '<', '>', '"', '\'']) {
                return Err(refused(
                    "+ of a safe string and another one, which jinja2 escapes",
                ));
            }
            return Ok(Value::from_safe_string(format!("{one}{other}")));
        }
        return Ok(Value::from([one, other].concat()));
    }
    if let (Some(one), Some(other)) = (sequence(a), sequence(b))
        && one == other
    {
        return Ok(of_sequence(
            one,
            a.try_iter()?.chain(b.try_iter()?).collect(),
        ));
    }
    arithmetic("+", a, b, i128::checked_add, |a, b| a + b)
}

fn multiply(a: &Value, b: &Value) -> Result {
    for (value, times) in [(a, b), (b, a)] {
        let Some(times) = integer(times) else {
            continue;
        };
        let times = usize::try_from(times.max(0)).map_err(|_| too_large())?;
        let is_small = |len: usize| {
            len.checked_mul(times)
                .is_some_and(|len| len <= MAX_REPEATED)
        };
        if let Some(text) = value.as_str() {
            return match is_small(text.len()) {
                true => Ok(Value::from(text.repeat(times))),
                false => Err(refused("a string is repeated too often")),
            };
        }
        if let Some(listed) = sequence(value) {
            let elements: Vec<Value> = value.try_iter()?.collect();
            if !is_small(elements.len()) {
                return Err(refused("a list is repeated too often"));
            }
            let repeated = std::iter::repeat_n(elements, times).flatten();
            return Ok(of_sequence(listed, repeated.collect()));
        }
    }
    arithmetic("*", a, b, i128::checked_mul, |a, b| a * b)
}

fn division_by_zero() -> Error {
    refused("division by zero")
}

fn divide(a: &Value, b: &Value) -> Result {
    let numbers = numbers("/", a, b)?;
    if let Numbers::Integers(a, b) = numbers
        && (a.unsigned_abs() > 1 << 53 || b.unsigned_abs() > 1 << 53)
    {
        return Err(refused("/ of integers of more than 53 bits"));
    }
    let a = float(a)?;
    let b = float(b)?;
    match b == 0.0 {
        true => Err(division_by_zero()),
        false => Ok(Value::from(a / b)),
    }
}

/// Quotient and remainder, which has the sign of the divisor.
fn floor_divide(operator: &str, a: &Value, b: &Value) -> Result<(Value, Value)> {
    match numbers(operator, a, b)? {
        Numbers::Integers(_, 0) => Err(division_by_zero()),
        Numbers::Integers(a, b) => {
            let quotient = a.checked_div(b).ok_or_else(too_large)?;
            let remainder = a % b;
            let is_below = remainder != 0 && (remainder < 0) != (b < 0);
            Ok(match is_below {
                true => (from_integer(quotient - 1), from_integer(remainder + b)),
                false => (from_integer(quotient), from_integer(remainder)),
            })
        }
        Numbers::Floats(_, 0.0) => Err(division_by_zero()),
        Numbers::Floats(a, b) => {
            // As float_divmod of CPython.
            let mut remainder = a % b;
            let mut quotient = (a - remainder) / b;
            if remainder == 0.0 {
                remainder = 0.0_f64.copysign(b);
            } else if (remainder < 0.0) != (b < 0.0) {
                remainder += b;
                quotient -= 1.0;
            }
            let floor = match quotient == 0.0 {
                true => 0.0_f64.copysign(a / b),
                false if quotient - quotient.floor() > 0.5 => quotient.floor() + 1.0,
                false => quotient.floor(),
            };
            Ok((Value::from(floor), Value::from(remainder)))
        }
    }
}

fn modulo(a: &Value, b: &Value) -> Result {
    if a.as_str().is_some() {
        return percent_format(a, b);
    }
    let (_, remainder) = floor_divide("%", a, b)?;
    Ok(remainder)
}

fn power(a: &Value, b: &Value) -> Result {
    match numbers("**", a, b)? {
        Numbers::Integers(a, b) if b >= 0 => {
            let exponent = u32::try_from(b).map_err(|_| too_large())?;
            a.checked_pow(exponent)
                .map(from_integer)
                .ok_or_else(too_large)
        }
        Numbers::Integers(..) | Numbers::Floats(..) => {
            let a = float(a)?;
            let b = float(b)?;
            if a == 0.0 && b < 0.0 {
                return Err(division_by_zero());
            }
            let power = a.powf(b);
            match a.is_finite() && b.is_finite() && !power.is_finite() {
                true => Err(refused("** of a negative number, or too large a power")),
                false => Ok(Value::from(power)),
            }
        }
    }
}

fn concatenate(first: &Value, rest: minijinja::value::Rest<Value>) -> Result<String> {
    let mut out = text(first)?;
    for value in rest.iter() {
        match value.as_str() {
            Some(text) => out.push_str(text),
            None => out.push_str(&text(value)?),
        }
    }
    Ok(out)
}

/// Python's `==`.
pub(super) fn equal(a: &Value, b: &Value) -> bool {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return a == b;
    }
    if is_number(a) && is_number(b) {
        return number_order(a, b) == Some(Ordering::Equal);
    }
    match (a.kind(), b.kind()) {
        (ValueKind::None, ValueKind::None) | (ValueKind::Undefined, ValueKind::Undefined) => true,
        (ValueKind::Map, ValueKind::Map) => {
            let keys: Vec<Value> = a.try_iter().into_iter().flatten().collect();
            let same = |key: &Value| match (a.get_item(key), b.get_item(key)) {
                (Ok(of_a), Ok(of_b)) => !of_b.is_undefined() && equal(&of_a, &of_b),
                _ => false,
            };
            a.len() == b.len() && keys.iter().all(same)
        }
        _ => match (sequence(a), sequence(b)) {
            (Some(one), Some(other)) if one == other => {
                let [a, b] = [a, b].map(|value| value.try_iter().into_iter().flatten());
                let [a, b]: [Vec<Value>; 2] = [a.collect(), b.collect()];
                a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| equal(a, b))
            }
            _ => false,
        },
    }
}

fn number_order(a: &Value, b: &Value) -> Option<Ordering> {
    match (integer(a), integer(b)) {
        (Some(a), Some(b)) => Some(a.cmp(&b)),
        _ => {
            let order = float(a).ok()?.partial_cmp(&float(b).ok()?)?;
            // An integer that no float is.
            let exact = |value: &Value| integer(value).is_none_or(|i| i.unsigned_abs() <= 1 << 53);
            match exact(a) && exact(b) || order != Ordering::Equal {
                true => Some(order),
                false => Some(exact_order(a, b)),
            }
        }
    }
}

/// The order of an integer and a float that round to the same float.
fn exact_order(a: &Value, b: &Value) -> Ordering {
    let exact = |value: &Value| integer(value).or_else(|| float(value).ok().map(|f| f as i128));
    exact(a).cmp(&exact(b))
}

/// Python's order of two values; `None` for a NaN.
pub(super) fn compare(operator: &str, a: &Value, b: &Value) -> Result<Option<Ordering>> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(Some(a.cmp(b)));
    }
    if is_number(a) && is_number(b) {
        return Ok(number_order(a, b));
    }
    match (sequence(a), sequence(b)) {
        (Some(one), Some(other)) if one == other => {
            let [one, other] = [a.try_iter()?, b.try_iter()?];
            for (a, b) in one.zip(other) {
                if !equal(&a, &b) {
                    return compare(operator, &a, &b);
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        _ => Err(unsupported(operator, a, b)),
    }
}

pub(super) fn contains(container: &Value, value: &Value) -> Result<bool> {
    if let Some(text) = container.as_str() {
        let part = value
            .as_str()
            .ok_or_else(|| unsupported("in", value, container))?;
        return Ok(text.contains(part));
    }
    match container.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::Map => {
            let key = key(value)?;
            Ok(container.try_iter()?.any(|one| equal(&one, &key)))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            Ok(container.try_iter()?.any(|one| equal(&one, value)))
        }
        _ => Err(unsupported("in", value, container)),
    }
}

/// A key of a dictionary.
pub(super) fn key(value: &Value) -> Result {
    match value.kind() {
        ValueKind::Map | ValueKind::Seq | ValueKind::Iterable | ValueKind::Undefined => {
            Err(refused(format!(
                "a {} as the key of a dictionary is not supported",
                value.kind()
            )))
        }
        _ => Ok(value.clone()),
    }
}

fn slice(value: &Value, start: &Value, stop: &Value, step: Option<&Value>) -> Result {
    let bound = |bound: &Value| match (bound.is_none(), integer(bound)) {
        (true, _) => Ok(None),
        (_, Some(bound)) => Ok(Some(bound)),
        _ => Err(refused(format!(
            "a slice has a bound that is {}",
            bound.kind()
        ))),
    };
    let step = step.map_or(Ok(None), bound)?.unwrap_or(1);
    let [start, stop] = [bound(start)?, bound(stop)?];
    if step == 0 {
        return Err(refused("the step of a slice is zero"));
    }
    let picked = |len: usize| {
        let len = len as i128;
        let [low, high] = if step > 0 { [0, len] } else { [-1, len - 1] };
        let place = |bound: Option<i128>, default: i128| match bound {
            None => default,
            Some(bound) if bound < 0 => (bound + len).clamp(low, high),
            Some(bound) => bound.clamp(low, high),
        };
        let [first, last] = if step > 0 { [low, high] } else { [high, low] };
        let mut at = place(start, first);
        let end = place(stop, last);
        let mut places = Vec::new();
        while if step > 0 { at < end } else { at > end } {
            places.push(at as usize);
            at = at.saturating_add(step);
        }
        places
    };
    if let Some(text) = value.as_str() {
        let characters: Vec<char> = text.chars().collect();
        let text: String = picked(characters.len())
            .into_iter()
            .map(|at| characters[at])
            .collect();
        return Ok(Value::from(text));
    }
    let Some(listed) = sequence(value) else {
        return Err(refused(format!("a slice of {}", value.kind())));
    };
    let elements: Vec<Value> = value.try_iter()?.collect();
    let picked = picked(elements.len()).into_iter();
    Ok(of_sequence(
        listed,
        picked.map(|at| elements[at].clone()).collect(),
    ))
}

/// `value[index]`.
pub(super) fn item(value: &Value, index: &Value) -> Result {
    if value.kind() == ValueKind::Map {
        let found = value.get_item(&key(index)?)?;
        let is_method = index
            .as_str()
            .is_some_and(|name| DICT_METHODS.contains(&name));
        return match found.is_undefined() && is_method && !is_namespace(value) {
            true => Err(method_as_value(index.as_str().unwrap_or_default())),
            false => Ok(found),
        };
    }
    let is_indexed = sequence(value).is_some() || listed(value) == Some(Listed::Range);
    let is_list = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    let Some(at) = integer(index).filter(|_| is_indexed || value.as_str().is_some()) else {
        return match is_list || value.as_str().is_some() {
            true => Ok(Value::UNDEFINED),
            false => value.get_item(index),
        };
    };
    let place = |len: usize| {
        let at = if at < 0 { at + len as i128 } else { at };
        usize::try_from(at).ok().filter(|&at| at < len)
    };
    if let Some(text) = value.as_str() {
        let at = place(text.chars().count());
        let character = at.and_then(|at| text.chars().nth(at));
        return Ok(character.map_or(Value::UNDEFINED, |c| Value::from(c.to_string())));
    }
    let place = value.len().and_then(place);
    match place {
        None => Ok(Value::UNDEFINED),
        Some(at) if value.kind() == ValueKind::Seq => value.get_item_by_index(at),
        Some(at) => Ok(value.try_iter()?.nth(at).unwrap_or_default()),
    }
}

/// `value.name` for a name that dictionaries have as a method.
fn attribute(value: &Value, name: &str) -> Result {
    match value.kind() {
        ValueKind::Map if !is_namespace(value) => Err(method_as_value(name)),
        ValueKind::String | ValueKind::Seq | ValueKind::Iterable => Err(method_as_value(name)),
        _ => value.get_attr(name),
    }
}

fn method_as_value(name: &str) -> Error {
    refused(format!(
        "{name} is a method in Python, and it is not called; write [{name:?}] for a key"
    ))
}

/// The elements of a loop.
pub(super) fn iterated(value: &Value) -> Result {
    if let Some(text) = value.as_str() {
        let characters = text.chars().map(|c| Value::from(c.to_string()));
        return Ok(Value::from(characters.collect::<Vec<_>>()));
    }
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => Ok(Value::from(value.try_iter()?.collect::<Vec<_>>())),
        ValueKind::Seq | ValueKind::Iterable => Ok(value.clone()),
        kind => Err(refused(format!("a {kind} is not iterable"))),
    }
}
