//! From a line to the tokens of an example.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use zero_models::hf::companions::end_tokens_in;

use super::line::Line;
use super::renderer::Renderer;
use super::template::{Rendered, special_tokens};
use crate::{DataError, TextTokenizer};

/// The end token of GPT-2, whose folders may not name it.
const GPT2_END: &str = "<|endoftext|>";

/// The files that decide the tokens of an example.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncoderSource {
    /// A tokenizer; `None` for one token per byte.
    pub tokenizer: Option<PathBuf>,
    /// The folder of the model, with its chat template and special tokens.
    pub folder: Option<PathBuf>,
    /// The end token; `None` for that of the folder.
    pub end: Option<u32>,
    /// The time for templates with a date, in seconds.
    pub now: i64,
}

impl EncoderSource {
    /// No files, and the current time.
    pub fn now() -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            now: now.map_or(0, |now| now.as_secs() as i64),
            ..Self::default()
        }
    }
}

/// Makes tokens of examples.
pub(super) struct Encoder {
    tokenizer: Option<TextTokenizer>,
    template: Option<Renderer>,
    /// The token that ends a text or a completion.
    pub(super) end: Option<u32>,
    /// Other tokens that end a turn of the model.
    turn_ends: Vec<u32>,
    /// Whether the tokenizer itself puts it behind each text.
    ends_texts: bool,
}

/// The tokens of one example.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Encoded {
    pub(super) tokens: Vec<u32>,
    /// For each token whether it is trained.
    pub(super) trained: Vec<bool>,
    /// Whether the prompt has other tokens alone than before its completion.
    pub(super) moved: bool,
}

impl Encoder {
    /// # Errors
    /// A tokenizer or a template that cannot be used.
    pub(super) fn open(source: &EncoderSource) -> Result<Self, DataError> {
        let tokenizer = source.tokenizer.as_deref();
        let dirs: Vec<&Path> = tokenizer
            .map(|path| match path.is_dir() {
                true => path,
                false => path.parent().unwrap_or(path),
            })
            .into_iter()
            .chain(source.folder.as_deref())
            .collect();
        let tokenizer = tokenizer.map(TextTokenizer::open).transpose()?;

        let mut template = None;
        for dir in &dirs {
            if template.is_none() {
                template = Renderer::open(dir, source.now)?;
            }
        }

        let mut named = None;
        let mut turn_ends = Vec::new();
        for dir in &dirs {
            named = named.or(special_tokens(dir)?.remove("eos_token"));
            turn_ends.extend(end_tokens_in(dir).map_err(DataError::Folder)?);
        }
        let configured = turn_ends.first().copied();
        let named = named.as_deref().unwrap_or(GPT2_END);
        let named = tokenizer
            .as_ref()
            .and_then(|tokenizer| tokenizer.token(named));
        let end = source.end.or(named).or(configured);
        turn_ends.retain(|&token| Some(token) != end);
        // Not of an empty text, where a token before the text is the last.
        let of_probe = match &tokenizer {
            Some(tokenizer) => tokenizer.encode_prompt("a")?,
            None => Vec::new(),
        };
        Ok(Self {
            ends_texts: end.is_some() && of_probe.last().copied() == end,
            end,
            turn_ends,
            template,
            tokenizer,
        })
    }

    /// Whether tokens are bytes.
    pub(super) fn is_bytes(&self) -> bool {
        self.tokenizer.is_none()
    }

    /// The tokens of a line, which is parsed from `text`. The error says what is wrong with it.
    pub(super) fn encode(&self, line: &Line, text: &str) -> Result<Encoded, String> {
        match line {
            Line::Text(text) => {
                let tokens = self.ended(self.tokens(text)?);
                Ok(Encoded {
                    trained: vec![true; tokens.len()],
                    tokens,
                    moved: false,
                })
            }
            Line::Completion { prompt, completion } => self.completion(prompt, completion),
            Line::Conversation => {
                let template = self.template.as_ref().ok_or(
                    "messages need a chat template, and the model's folder has none: add chat_template.jinja to the \
                     folder, pass --tokenizer with a folder that has one, or use `prompt` and `completion`",
                )?;
                self.rendered(&template.render(text)?)
            }
        }
    }

    /// A prompt and its completion are tokenized as one text, as a model meets them; what the
    /// prompt has alone is not trained.
    fn completion(&self, prompt: &str, completion: &str) -> Result<Encoded, String> {
        let mut alone = self.tokens(prompt)?;
        if self.ends_texts {
            alone.pop();
        }
        let tokens = self.ended(self.tokens(&format!("{prompt}{completion}"))?);
        let given = alone.len().min(tokens.len());
        Ok(Encoded {
            trained: (0..tokens.len()).map(|i| i >= given).collect(),
            moved: tokens[..given] != alone,
            tokens,
        })
    }

    /// The tokens of a rendered conversation, which has its special tokens as text.
    pub(super) fn rendered(&self, rendered: &Rendered) -> Result<Encoded, String> {
        let Some(tokenizer) = &self.tokenizer else {
            let tokens = rendered.text.bytes().map(u32::from).collect();
            let is_trained = |i| rendered.spans.iter().any(|span| span.contains(&i));
            return Ok(Encoded {
                tokens,
                trained: (0..rendered.text.len()).map(is_trained).collect(),
                moved: false,
            });
        };

        let (tokens, places) = tokenizer
            .encode_with_places(&rendered.text)
            .map_err(|e| e.to_string())?;
        let overlaps = |place: &Range<usize>, span: &Range<usize>| {
            place.start < span.end && span.start < place.end
        };
        let is_trained =
            |place: &Range<usize>| rendered.spans.iter().any(|span| overlaps(place, span));
        let mut trained: Vec<bool> = places.iter().map(is_trained).collect();
        if !rendered.marked {
            self.add_turn_ends(&tokens, &mut trained);
        }
        Ok(Encoded {
            tokens,
            trained,
            moved: false,
        })
    }

    /// Trains the token that ends a turn where a template writes it with the next message, as where
    /// it is that message's header.
    fn add_turn_ends(&self, tokens: &[u32], trained: &mut [bool]) {
        let is_end = |at: usize| self.turn_ends.contains(&tokens[at]);
        for at in 1..tokens.len() {
            let ends_here = trained[at - 1] && !trained[at];
            if ends_here && is_end(at) && !is_end(at - 1) {
                trained[at] = true;
            }
        }
    }

    fn tokens(&self, text: &str) -> Result<Vec<u32>, String> {
        match &self.tokenizer {
            None => Ok(text.bytes().map(u32::from).collect()),
            Some(tokenizer) => tokenizer.encode_prompt(text).map_err(|e| e.to_string()),
        }
    }

    /// The tokens with the end token, once.
    fn ended(&self, mut tokens: Vec<u32>) -> Vec<u32> {
        if tokens.last().copied() != self.end {
            tokens.extend(self.end);
        }
        tokens
    }

    /// Tokens as text.
    pub(super) fn decode(&self, tokens: &[u32]) -> Result<String, DataError> {
        match &self.tokenizer {
            Some(tokenizer) => tokenizer.decode(tokens),
            None => {
                let bytes: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
        }
    }
}
