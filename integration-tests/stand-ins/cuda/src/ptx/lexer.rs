//! The lexer: PTX text to tokens.

/// A token. A word is a name, a directive or an opcode with its dots: `%r1`, `.reg`,
/// `ld.global.v4.b32`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token {
    Word(String),
    Integer(u64),
    /// Written as hexadecimal bits: `0f3F800000`; `F64` is `0d3FF0000000000000`.
    F32(u32),
    F64(u64),
    Text(String),
    Mark(char),
}

/// An error in a program, with its line.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Mistake {
    pub(crate) line: u32,
    pub(crate) what: String,
}

impl std::fmt::Display for Mistake {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

fn begins_word(c: u8) -> bool {
    c.is_ascii_alphabetic() || matches!(c, b'_' | b'$' | b'%' | b'.')
}

fn in_word(c: u8) -> bool {
    begins_word(c) || c.is_ascii_digit()
}

/// All tokens, each with its line number, from 1.
pub(crate) fn tokens(text: &str) -> Result<Vec<(u32, Token)>, Mistake> {
    let bytes = text.as_bytes();
    let mut at = 0;
    let mut line = 1u32;
    let mut found = Vec::new();

    while let Some(&c) = bytes.get(at) {
        let rest = &text[at..];
        if c == b'\n' {
            line += 1;
            at += 1;
        } else if c.is_ascii_whitespace() {
            at += 1;
        } else if rest.starts_with("//") {
            at += rest.find('\n').unwrap_or(rest.len());
        } else if rest.starts_with("/*") {
            let len = rest.find("*/").map_or(rest.len(), |end| end + 2);
            line += rest[..len].matches('\n').count() as u32;
            at += len;
        } else if begins_word(c) {
            let mut len = 1;
            loop {
                match bytes.get(at + len) {
                    Some(&c) if in_word(c) => len += 1,
                    // `shared::cta` is one word; `label:` is not.
                    Some(b':') if bytes.get(at + len + 1) == Some(&b':') => len += 2,
                    _ => break,
                }
            }
            found.push((line, Token::Word(rest[..len].to_owned())));
            at += len;
        } else if c.is_ascii_digit() {
            let len = rest
                .bytes()
                .take_while(|c| c.is_ascii_alphanumeric())
                .count();
            let number = number(&rest[..len]);
            found.push((
                line,
                number.ok_or(Mistake {
                    line,
                    what: format!("no number: {}", &rest[..len]),
                })?,
            ));
            at += len;
        } else if c == b'"' {
            let len = rest[1..].find('"').ok_or(Mistake {
                line,
                what: "a string without an end".into(),
            })?;
            found.push((line, Token::Text(rest[1..=len].to_owned())));
            at += len + 2;
        } else if c.is_ascii() {
            found.push((line, Token::Mark(char::from(c))));
            at += 1;
        } else {
            return Err(Mistake {
                line,
                what: "a character that is not ASCII".into(),
            });
        }
    }

    Ok(found)
}

fn number(text: &str) -> Option<Token> {
    let (head, tail) = text.split_at(text.len().min(2));
    match head {
        "0f" | "0F" => u32::from_str_radix(tail, 16).ok().map(Token::F32),
        "0d" | "0D" => u64::from_str_radix(tail, 16).ok().map(Token::F64),
        "0x" | "0X" => u64::from_str_radix(tail.trim_end_matches('U'), 16)
            .ok()
            .map(Token::Integer),
        "0b" | "0B" => u64::from_str_radix(tail.trim_end_matches('U'), 2)
            .ok()
            .map(Token::Integer),
        _ => text.trim_end_matches('U').parse().ok().map(Token::Integer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_numbers_and_marks_are_told_apart() {
        let text =
            "@%p1 ld.shared::cta.b32 /* a\nb */ %r1, [x+4]; // end\n$L: mov.f32 %f, 0f3F800000;";
        let all = tokens(text).unwrap();
        let words: Vec<&str> = all
            .iter()
            .filter_map(|(_, t)| {
                if let Token::Word(w) = t {
                    Some(w.as_str())
                } else {
                    None
                }
            })
            .collect();

        assert_eq!(
            words,
            [
                "%p1",
                "ld.shared::cta.b32",
                "%r1",
                "x",
                "$L",
                "mov.f32",
                "%f"
            ]
        );

        assert!(
            all.contains(&(2, Token::Integer(4))) && all.contains(&(3, Token::F32(0x3f80_0000)))
        );
        assert!(all.contains(&(3, Token::Mark(':'))));
        assert_eq!(tokens("\n 12q").unwrap_err().line, 2);
    }
}
