//! Text to tokens and back, token by token.

use std::path::PathBuf;

use zero_data::{MAX_BYTE_VOCAB, TextTokenizer};

use crate::error::CliError;

/// How text becomes tokens.
pub(crate) enum Codec {
    /// One token a byte.
    Bytes,
    Tokenizer(Box<TextTokenizer>),
    /// No text: tokens are printed as numbers with commas between them.
    Numbers,
}

impl Codec {
    /// That of the tokenizer; without one, bytes, if the model's vocabulary is so small.
    pub(crate) fn open(tokenizer: Option<PathBuf>, vocab: usize) -> Result<Self, CliError> {
        match tokenizer {
            Some(path) => {
                let tokenizer = TextTokenizer::open(&path).map_err(CliError::usage)?;
                Ok(Self::Tokenizer(Box::new(tokenizer)))
            }
            None if vocab <= MAX_BYTE_VOCAB => Ok(Self::Bytes),
            None => Err(usage!(
                "the model's vocabulary has {vocab} tokens, and its folder no tokenizer: pass --tokenizer FILE"
            )),
        }
    }

    /// The codec for a prompt of tokens: that of the tokenizer, of bytes, or else of numbers.
    pub(crate) fn of_tokens(tokenizer: Option<PathBuf>, vocab: usize) -> Result<Self, CliError> {
        match tokenizer {
            None if vocab > MAX_BYTE_VOCAB => Ok(Self::Numbers),
            tokenizer => Self::open(tokenizer, vocab),
        }
    }

    /// Whether tokens have a text.
    pub(crate) fn has_text(&self) -> bool {
        !matches!(self, Self::Numbers)
    }

    /// The tokens of a prompt, with the special tokens that the tokenizer puts at a start.
    pub(crate) fn encode(&self, text: Vec<u8>) -> Result<Vec<u32>, CliError> {
        match self {
            Self::Bytes => Ok(text.into_iter().map(u32::from).collect()),
            Self::Tokenizer(tokenizer) => {
                let text = String::from_utf8(text).map_err(|e| {
                    let at = e.utf8_error().valid_up_to();
                    usage!("the prompt is not UTF-8 text at byte {at}")
                })?;
                tokenizer.encode_prompt(&text).map_err(CliError::usage)
            }
            Self::Numbers => Err(usage!(
                "a text needs a tokenizer: pass --tokenizer FILE, or --token-ids"
            )),
        }
    }

    pub(crate) fn decoder(&self) -> Decoder<'_> {
        Decoder {
            codec: self,
            tokens: Vec::new(),
            printed: 0,
        }
    }
}

/// Turns tokens into text as they come: a token may be a part of a character.
pub(crate) struct Decoder<'a> {
    codec: &'a Codec,
    /// The tokens since a point where the text of the earlier ones was whole.
    tokens: Vec<u32>,
    /// Bytes of their text that were returned.
    printed: usize,
}

/// Tokens that are kept for the spaces between words, which depend on the token before.
const KEPT: usize = 16;

impl Decoder<'_> {
    /// The text that is known with the next token.
    pub(crate) fn next(&mut self, token: u32) -> Result<Vec<u8>, CliError> {
        self.tokens.push(token);
        let text = match self.codec {
            Codec::Bytes => {
                self.tokens.clear();
                return Ok(u8::try_from(token).into_iter().collect());
            }
            Codec::Numbers => {
                self.tokens.truncate(1);
                let comma = if self.printed == 0 { "" } else { "," };
                self.printed = 1;
                return Ok(format!("{comma}{token}").into_bytes());
            }
            Codec::Tokenizer(tokenizer) => {
                tokenizer.decode(&self.tokens).map_err(CliError::failure)?
            }
        };
        // A part of a character decodes to this.
        if text.ends_with('\u{fffd}') {
            return Ok(Vec::new());
        }
        let part = text
            .as_bytes()
            .get(self.printed..)
            .unwrap_or_default()
            .to_vec();
        self.printed = text.len();
        if self.tokens.len() > 2 * KEPT {
            self.tokens.drain(..self.tokens.len() - KEPT);
            self.printed = self.text()?.len();
        }
        Ok(part)
    }

    /// What is left at the end.
    pub(crate) fn rest(&mut self) -> Result<Vec<u8>, CliError> {
        let text = self.text()?;
        Ok(text
            .as_bytes()
            .get(self.printed..)
            .unwrap_or_default()
            .to_vec())
    }

    fn text(&self) -> Result<String, CliError> {
        match self.codec {
            Codec::Bytes | Codec::Numbers => Ok(String::new()),
            Codec::Tokenizer(tokenizer) => {
                tokenizer.decode(&self.tokens).map_err(CliError::failure)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each part is whole characters, and together they are the text.
    #[test]
    fn text_comes_in_whole_characters() {
        let folder = integration_tests::data("../tokenizer");
        let codec = Codec::open(Some(folder), 50_257).unwrap();
        let text = "Größe, 漢字 and 🦀🦀: a sentence that is longer than what is kept, ".repeat(4);
        let tokens = codec.encode(text.clone().into_bytes()).unwrap();
        let mut decoder = codec.decoder();
        let mut whole = String::new();
        for token in tokens {
            whole += &String::from_utf8(decoder.next(token).unwrap()).unwrap();
        }
        whole += &String::from_utf8(decoder.rest().unwrap()).unwrap();
        assert_eq!(whole, text);
    }

    #[test]
    fn bytes_are_their_own_text() {
        let codec = Codec::open(None, 256).unwrap();
        assert_eq!(codec.encode(vec![0, 255]).unwrap(), [0, 255]);
        let mut decoder = codec.decoder();
        assert_eq!(decoder.next(255).unwrap(), [255]);
        assert!(decoder.next(300).unwrap().is_empty());
        assert!(decoder.rest().unwrap().is_empty());
    }

    #[test]
    fn tokens_without_a_tokenizer_are_numbers() {
        let codec = Codec::of_tokens(None, 50_257).unwrap();
        assert!(!codec.has_text());
        assert!(codec.encode(b"text".to_vec()).is_err());
        let mut decoder = codec.decoder();
        let parts = [7, 50_256, 0].map(|token| decoder.next(token).unwrap());
        assert_eq!(parts.concat(), b"7,50256,0");
        assert!(decoder.rest().unwrap().is_empty());
        assert!(Codec::of_tokens(None, 256).unwrap().has_text());
    }

    #[test]
    fn large_vocabulary_needs_a_tokenizer() {
        let error = Codec::open(None, 50_257).err().unwrap().to_string();
        assert!(error.contains("50257 tokens"), "{error}");
        let folder = integration_tests::data("../tokenizer");
        let codec = Codec::open(Some(folder), 50_257).unwrap();
        let error = codec.encode(vec![b'a', 0xff]).unwrap_err().to_string();
        assert!(error.contains("not UTF-8 text at byte 1"), "{error}");
    }
}
