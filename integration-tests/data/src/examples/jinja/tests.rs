//! Templates against jinja2 itself, and what is refused.

use std::path::Path;
use std::process::Command;

use minijinja::Value;

use super::{TRACE, environment, rewrite};
use crate::examples::trace::Trace;

/// Renders a template. The error is the reason, without its place.
fn render(template: &str, values: &Value) -> Result<String, String> {
    let source = rewrite(template)?;
    let mut environment = environment();
    environment.add_global(TRACE, Value::from_object(Trace::default()));
    let detail = |error: minijinja::Error| {
        let detail = error.detail().map(str::to_owned);
        detail.unwrap_or_else(|| error.to_string())
    };
    environment
        .add_template_owned("t", source.text)
        .map_err(detail)?;
    let template = environment.get_template("t").map_err(detail)?;
    template.render(values).map_err(detail)
}

/// Random templates have the text that jinja2 gives them, or are refused. The number of cases is
/// that of property tests: `PROPTEST_CASES`.
#[test]
fn random_templates_render_as_by_jinja2() {
    let cases = std::env::var("PROPTEST_CASES").unwrap_or_else(|_| "300".to_owned());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/jinja_cases.py");
    let script = script.display().to_string();
    let made = Command::new("python3")
        .args(["-W", "ignore", &script, "1", &cases])
        .output();
    let made = match made {
        Ok(made) if made.status.success() => String::from_utf8(made.stdout).unwrap(),
        other => {
            let has_jinja2 = Command::new("python3")
                .args(["-c", "import jinja2"])
                .status();
            assert!(
                !has_jinja2.is_ok_and(|status| status.success()),
                "{other:?}"
            );
            eprintln!("skipped: python3 with jinja2 is not installed");
            return;
        }
    };

    let mut same = 0;
    let mut refused = Vec::new();
    for line in made.lines() {
        let case: serde_json::Value = serde_json::from_str(line).unwrap();
        // The order of keys counts.
        let values: Value = serde_json::from_str(line).unwrap();
        let values = values.get_attr("values").unwrap();
        let template = case["template"].as_str().unwrap();
        match (case["text"].as_str(), render(template, &values)) {
            (Some(expected), Ok(text)) => {
                assert_eq!(text, expected, "{template} with {}", case["values"]);
                same += 1;
            }
            (None, Ok(text)) => panic!(
                "{template} with {}: {text:?}, jinja2: {}",
                case["values"], case["error"]
            ),
            (Some(_), Err(error)) => refused.push((template.to_owned(), error)),
            (None, Err(_)) => {}
        }
    }
    assert!(
        10 * refused.len() < same,
        "{same} are the same, refused are {refused:?}"
    );
}

/// Templates that jinja2 renders otherwise, or refuses, are refused by name.
#[test]
fn what_differs_is_refused() {
    let values = Value::from_serialize(serde_json::json!({
        "d": {"a": 1, "items": 2}, "l": [1, 2], "s": "text", "big": i64::MAX,
    }));
    for (template, expected) in [
        (
            "{{ d.items }}",
            "items is a method in Python, and it is not called",
        ),
        ("{{ d['keys'] }}", "keys is a method in Python"),
        ("{{ l.values }}", "values is a method in Python"),
        (
            "{{ s.encode() }}",
            "the method encode of a string is not supported",
        ),
        (
            "{{ d.update(d) }}",
            "the method update of a map is not supported",
        ),
        (
            "{{ l.append(1) }}",
            "the method append of a sequence is not supported",
        ),
        ("{{ (s|safe).upper() }}", "upper of a safe string"),
        ("{{ s.replace(u, s) }}", "with an undefined argument"),
        (
            "{{ (s|safe) + '<' }}",
            "+ of a safe string and another one, which jinja2 escapes",
        ),
        (
            "{{ [s|safe] }}",
            "a safe string in a list or a dictionary is printed",
        ),
        (
            "{{ range(3) }}",
            "a range, or what a filter makes, is printed",
        ),
        (
            "{{ l|map('string') }}",
            "a range, or what a filter makes, is printed",
        ),
        ("{{ l|map('string')|length }}", "has no length"),
        (
            "{{ l|map('string')|last }}",
            "what a filter makes is reversed",
        ),
        ("{{ namespace(a=1) }}", "a namespace is printed"),
        ("{{ dict }}", "which Python prints otherwise"),
        (
            "{{ s + 1 }}",
            "+ of string and number, which Python refuses",
        ),
        (
            "{{ s < 1 }}",
            "< of string and number, which Python refuses",
        ),
        (
            "{{ 1 in s }}",
            "in of number and string, which Python refuses",
        ),
        (
            "{{ 1 in 2 }}",
            "in of number and number, which Python refuses",
        ),
        ("{{ 1 // 0 }}", "division by zero"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 1.5 % 0.0 }}", "division by zero"),
        ("{{ 0 ** -1 }}", "division by zero"),
        ("{{ 4 is divisibleby 0 }}", "division by zero"),
        ("{{ big * big * big }}", "an integer of more than 127 bits"),
        ("{{ big / 3 }}", "/ of integers of more than 53 bits"),
        ("{{ (-2) ** 0.5 }}", "** of a negative number"),
        ("{{ s * big }}", "a string is repeated too often"),
        ("{{ l * big }}", "a list is repeated too often"),
        ("{{ l[::0] }}", "the step of a slice is zero"),
        ("{{ l['a':] }}", "a slice has a bound that is string"),
        ("{{ d[1:] }}", "a slice of map"),
        (
            "{{ {l: 1} }}",
            "a sequence as the key of a dictionary is not supported",
        ),
        ("{% for a in 1 %}{% endfor %}", "a number is not iterable"),
        ("{{ range(200000) }}", "a range of more than 100000"),
        ("{{ range(1, 2, 0) }}", "a step that is not zero"),
        ("{{ range('a') }}", "range: a bound is no integer"),
        ("{{ 1|length }}", "a number has no length"),
        ("{{ u|int }}", "int of undefined"),
        ("{{ u|float }}", "float of undefined"),
        (
            "{{ '1_0'|int }}",
            "int of the string \"1_0\" is not supported",
        ),
        ("{{ 1e40|int }}", "int of a number that is too large"),
        (
            "{{ 'inf'|float }}",
            "float of the string \"inf\" is not supported",
        ),
        ("{{ s|abs }}", "abs of string"),
        ("{{ s|round }}", "round of string"),
        ("{{ 1.5|round(-1) }}", "a precision of 0 to 15 is supported"),
        ("{{ 1.5|round(1, 'up') }}", "round: no method \"up\""),
        ("{{ 1|indent }}", "indent of number"),
        (
            "{{ 'a\\rb'|indent }}",
            "indent of lines that do not end with \\n",
        ),
        (
            "{{ s|indent(l) }}",
            "the width is neither a number nor a string",
        ),
        (
            "{{ 'é'|wordcount }}",
            "wordcount of other than ASCII characters",
        ),
        ("{{ 'é'.title() }}", "title of other than ASCII characters"),
        (
            "{{ '²'.isdigit() }}",
            "isdigit of the character '²' is not supported",
        ),
        ("{{ 'ͅ'.isalpha() }}", "isalpha of the character"),
        ("{{ [1.5]|sum }}", "sum of floats is not supported"),
        ("{{ [s]|sum(start='') }}", "sum of strings"),
        (
            "{{ l|sort(attribute='a,b') }}",
            "several attributes are not supported",
        ),
        ("{{ [1, 'a']|sort }}", "which Python refuses"),
        ("{{ [l]|unique }}", "unique of lists or dictionaries"),
        ("{{ d|dictsort(by='a') }}", "dictsort by \"a\""),
        ("{{ l|dictsort }}", "dictsort of sequence"),
        ("{{ l|items }}", "items of sequence"),
        ("{{ [1]|urlencode }}", "is not iterable"),
        (
            "{{ ['abc']|urlencode }}",
            "urlencode: an element is no pair",
        ),
        ("{{ l|join(1, 2, 3) }}", "a filter has too many arguments"),
        ("{{ l|sum(attribute=1) }}", "an argument is no string"),
        ("{{ s|groupby('a') }}", "filter groupby is unknown"),
        ("{{ s is callable }}", "test callable is unknown"),
        ("{{ '%(a)s' % d }}", "% with names is not supported"),
        (
            "{{ '%5d' % 1 }}",
            "a conversion of % that is not s, d, i or f",
        ),
        ("{{ '%d' % s }}", "%d of no number"),
        ("{{ '%f' % s }}", "%f of no number"),
        ("{{ '%s%s' % s }}", "% has too few values"),
        ("{{ '' % 1 }}", "% has too many values"),
        (
            "{{ '{:>3}'.format(1) }}",
            "the field \":>3\" is not supported",
        ),
        (
            "{{ '{'.format(1) }}",
            "a brace that is not closed or opened",
        ),
        ("{{ '{}'.format() }}", "an argument is missing"),
        ("{{ s.split('') }}", "a separator is empty, or no string"),
        ("{{ s.partition('') }}", "an empty separator"),
        (
            "{{ ' a b'.rsplit(none, 1) }}",
            "rsplit by white space with a limit",
        ),
        ("{{ s.index('z') }}", "substring not found"),
        ("{{ l.index(3) }}", "the value is not in the list"),
        ("{{ ','.join(l) }}", "join: an element is no string"),
        (
            "{{ s.startswith(1) }}",
            "startswith: the argument is number",
        ),
        ("{{ s.strip(1) }}", "strip: no string"),
        ("{{ s.center(9, 'ab') }}", "the fill is not one character"),
        (
            "{{ s.zfill(99999999) }}",
            "a width of 99999999; at most 65535 are supported",
        ),
        (
            "{{ {1: 2, 'a': 3}|tojson(sort_keys=true) }}",
            "keys that are no strings are sorted",
        ),
        (
            "{% macro f(a, b=1) %}{% endmacro %}{{ f(1, u) }}",
            "an argument of a macro, which has a default for it, is undefined",
        ),
    ] {
        let error = render(template, &values).expect_err(template);
        assert!(error.contains(expected), "{template}: {error}");
    }
}
