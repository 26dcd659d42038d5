//! The prompt of Alpaca's rows: that of `train.py` of github.com/tatsu-lab/stanford_alpaca, whose
//! loss is that of the output and the end token.

/// The text before the output of a row; an empty `input` is left out.
pub(super) fn prompt(instruction: &str, input: &str) -> String {
    if input.is_empty() {
        return format!(
            "Below is an instruction that describes a task. Write a response that appropriately completes the \
             request.\n\n### Instruction:\n{instruction}\n\n### Response:"
        );
    }
    format!(
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a \
         response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### \
         Input:\n{input}\n\n### Response:"
    )
}

/// # Errors
/// A key that other trainers read, and that has no place in the prompt, is not empty.
pub(super) fn check_unused(key: &str, is_empty: bool) -> Result<(), String> {
    if is_empty {
        return Ok(());
    }
    Err(format!(
        "it has `{key}` beside `instruction`, which Alpaca's prompt does not have: write the row as `messages`"
    ))
}

#[cfg(test)]
mod tests {
    use crate::examples::line::{Form, Line};

    fn parse(row: &str) -> (String, String) {
        match Line::parse(row) {
            Ok((
                Form::Alpaca,
                Line::Completion {
                    prompt, completion, ..
                },
            )) => (prompt, completion),
            other => panic!("{row}: {other:?}"),
        }
    }

    /// The expected texts are PROMPT_DICT of Stanford's `train.py`, formatted by Python.
    #[test]
    fn prompt_is_that_of_stanford() {
        let row = r#"{"instruction": "Add.", "input": "1+2", "output": "3", "history": []}"#;
        let expected = "Below is an instruction that describes a task, paired with an input that provides further \
                        context. Write a response that appropriately completes the request.\n\n### Instruction:\n\
                        Add.\n\n### Input:\n1+2\n\n### Response:";
        assert_eq!(parse(row), (expected.to_owned(), "3".to_owned()));

        let expected = "Below is an instruction that describes a task. Write a response that appropriately \
                        completes the request.\n\n### Instruction:\nAdd.\n\n### Response:";
        for row in [
            r#"{"instruction": "Add.", "input": "", "output": "3", "system": ""}"#,
            r#"{"instruction": "Add.", "output": "3"}"#,
        ] {
            assert_eq!(parse(row), (expected.to_owned(), "3".to_owned()));
        }
    }

    #[test]
    fn other_columns_are_errors() {
        for (row, expected) in [
            (
                r#"{"instruction": "a", "output": "b", "system": "c"}"#,
                "it has `system` beside `instruction`",
            ),
            (
                r#"{"instruction": "a", "output": "b", "history": [["c", "d"]]}"#,
                "it has `history` beside",
            ),
            (
                r#"{"instruction": "a", "output": 3}"#,
                "`output` is number, and must be a string",
            ),
            (
                r#"{"instruction": "a", "input": {}, "output": "b"}"#,
                "`input` is map, and must be a string",
            ),
        ] {
            let error = Line::parse(row).unwrap_err();
            assert!(error.contains(expected), "{row}: {error}");
        }
    }
}
