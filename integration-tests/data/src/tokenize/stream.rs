//! Tokens of many texts on several threads, in bounded memory.
//!
//! One thread reads batches of pieces and deals them to the workers in turn; the caller collects
//! their tokens in the same turn. So the order, and each token, is the same with any number of
//! threads. A channel holds one batch, which bounds the memory.

use std::io::Read;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use super::encoder::{Encoder, Failed};
use super::special::DocumentEnds;
use super::{DataError, TextTokenizer, caught};

/// Approximate bytes of a batch.
const BATCH_BYTES: usize = 1 << 18;

/// A part of a document, or all of it.
pub(crate) struct Piece {
    pub(crate) text: String,
    /// The file of the document, for errors.
    pub(crate) file: Arc<PathBuf>,
    /// Whether this is the first piece of the document.
    pub(crate) starts: bool,
    /// Whether this is its last.
    pub(crate) ends: bool,
    /// Whether this is the first piece of a file.
    pub(crate) starts_file: bool,
}

/// The tokens of a batch.
#[derive(Default)]
pub(crate) struct BatchTokens {
    pub(crate) tokens: Vec<u32>,
    /// The positions in `tokens` where files start.
    pub(crate) files: Vec<usize>,
    /// Bytes of text.
    pub(crate) bytes: u64,
}

/// Accepts pieces in order and sends them to the workers in batches.
pub(crate) struct Pieces {
    workers: Vec<SyncSender<Vec<Piece>>>,
    next: usize,
    batch: Vec<Piece>,
    bytes: usize,
}

/// The collector has stopped, by an error of its own.
pub(crate) struct Stopped;

impl Pieces {
    pub(crate) fn push(&mut self, piece: Piece) -> Result<(), Stopped> {
        self.bytes += piece.text.len();
        self.batch.push(piece);
        if self.bytes >= BATCH_BYTES {
            self.send()
        } else {
            Ok(())
        }
    }

    fn send(&mut self) -> Result<(), Stopped> {
        let batch = mem::take(&mut self.batch);
        self.bytes = 0;
        let worker = &self.workers[self.next];
        self.next = (self.next + 1) % self.workers.len();
        worker.send(batch).map_err(|_| Stopped)
    }
}

/// Why reading ended early.
pub(crate) enum ReadFailure {
    Data(DataError),
    Stopped,
}

impl From<DataError> for ReadFailure {
    fn from(error: DataError) -> Self {
        Self::Data(error)
    }
}

impl From<Stopped> for ReadFailure {
    fn from(_: Stopped) -> Self {
        Self::Stopped
    }
}

impl TextTokenizer {
    /// Tokenizes what `read` pushes, on `threads` threads, and calls `collect` with the tokens in
    /// order.
    ///
    /// # Errors
    /// Those of `read`, `collect` and the tokenizer; the first by position.
    pub(crate) fn tokenize(
        &self,
        threads: usize,
        ends: &DocumentEnds,
        read: impl FnOnce(&mut Pieces) -> Result<(), ReadFailure> + Send,
        mut collect: impl FnMut(BatchTokens) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        thread::scope(|scope| {
            let (mut workers, mut results) = (Vec::new(), Vec::new());
            for _ in 0..threads.max(1) {
                let (to_worker, batches) = sync_channel(1);
                let (to_collector, result) = sync_channel(1);
                scope.spawn(move || self.work(ends, &batches, &to_collector));
                workers.push(to_worker);
                results.push(result);
            }

            let reader = scope.spawn(move || {
                let mut pieces = Pieces {
                    workers,
                    next: 0,
                    batch: Vec::new(),
                    bytes: 0,
                };
                read(&mut pieces)?;
                Ok(pieces.send()?)
            });

            let mut turn = (0..results.len()).cycle();
            while let Some(Ok(tokens)) = turn.next().map(|worker| results[worker].recv()) {
                collect(tokens?)?;
            }
            // Workers and reader must not wait for this thread.
            drop(results);
            match reader.join() {
                Ok(Err(ReadFailure::Data(error))) => Err(error),
                Ok(_) => Ok(()),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Tokenizes batches until there are no more.
    fn work(
        &self,
        ends: &DocumentEnds,
        batches: &Receiver<Vec<Piece>>,
        results: &SyncSender<Result<BatchTokens, DataError>>,
    ) {
        let mut encoder = Encoder::new(&self.inner, self.rules.as_ref(), &self.named);
        for batch in batches {
            let result = match &mut encoder {
                Ok(encoder) => self.encode_batch(encoder, ends, &batch),
                Err(error) => Err(self.error("not a tokenizer", error)),
            };
            if results.send(result).is_err() {
                return;
            }
        }
    }

    fn encode_batch(
        &self,
        encoder: &mut Encoder<'_>,
        ends: &DocumentEnds,
        batch: &[Piece],
    ) -> Result<BatchTokens, DataError> {
        let mut out = BatchTokens::default();
        for piece in batch {
            if piece.starts_file {
                out.files.push(out.tokens.len());
            }
            if piece.starts {
                out.tokens.extend_from_slice(&ends.before);
            }
            let encoded = caught(|| {
                let encoded = encoder.encode(&piece.text, piece.starts, &mut out.tokens);
                encoded.map_err(|Failed(error)| error)
            });
            encoded.map_err(|error| self.file_error(&piece.file, &error))?;
            if piece.ends {
                out.tokens.extend_from_slice(&ends.after);
            }
            out.bytes += piece.text.len() as u64;
        }
        Ok(out)
    }

    /// Pushes the text of `input`, one document, in pieces. It ends with a line break if `line`.
    pub(crate) fn push_document(
        &self,
        input: &mut impl Read,
        file: &Path,
        line: bool,
        pieces: &mut Pieces,
    ) -> Result<(), ReadFailure> {
        let path = Arc::new(file.to_owned());
        let mut starts = true;
        let mut cutter = Cutter::new(self, input, file, line);
        loop {
            let (text, ends) = cutter.next()?;
            pieces.push(Piece {
                text,
                file: Arc::clone(&path),
                starts,
                ends,
                starts_file: starts,
            })?;
            if ends {
                return Ok(());
            }
            starts = false;
        }
    }
}

/// Cuts a text into parts whose tokens are those of the whole.
struct Cutter<'a, R> {
    tokenizer: &'a TextTokenizer,
    input: &'a mut R,
    file: &'a Path,
    /// Whether the text is to end with a line break.
    line: bool,
    /// What was read and not returned: text, and the start of a character.
    text: String,
    rest: Vec<u8>,
    /// Bytes before `text`.
    position: usize,
}

impl<'a, R: Read> Cutter<'a, R> {
    fn new(tokenizer: &'a TextTokenizer, input: &'a mut R, file: &'a Path, line: bool) -> Self {
        Self {
            tokenizer,
            input,
            file,
            line,
            text: String::new(),
            rest: Vec::new(),
            position: 0,
        }
    }

    /// The next part, and whether it is the last.
    fn next(&mut self) -> Result<(String, bool), DataError> {
        loop {
            let searched = self.text.len();
            if !self.read(searched.max(BATCH_BYTES))? {
                if self.line && !self.text.ends_with('\n') {
                    self.text.push('\n');
                }
                return Ok((mem::take(&mut self.text), true));
            }
            if let Some(at) = self.last_cut(searched) {
                let rest = self.text.split_off(at);
                self.position += at;
                return Ok((mem::replace(&mut self.text, rest), false));
            }
        }
    }

    /// The last place in the text, from byte `from` on, where it can be cut.
    fn last_cut(&self, from: usize) -> Option<usize> {
        let rules = self.tokenizer.rules.as_ref()?;
        let mut places = (from.max(1)..self.text.len()).rev();
        places.find(|&at| self.text.is_char_boundary(at) && rules.can_cut(&self.text, at))
    }

    /// Reads about `bytes` more; false at the end of the file.
    fn read(&mut self, bytes: usize) -> Result<bool, DataError> {
        let mut block = mem::take(&mut self.rest);
        let read = self
            .input
            .by_ref()
            .take(bytes as u64)
            .read_to_end(&mut block);
        let read = read.map_err(|source| DataError::Read {
            path: self.file.to_owned(),
            source,
        })?;
        match std::str::from_utf8(&block) {
            Ok(text) => self.text.push_str(text),
            Err(error) => {
                let (text, rest) = block.split_at(error.valid_up_to());
                if error.error_len().is_some() || read == 0 {
                    return Err(DataError::NotUtf8 {
                        path: self.file.to_owned(),
                        at: self.position + self.text.len() + text.len(),
                    });
                }
                self.text.push_str(&String::from_utf8_lossy(text));
                self.rest = rest.to_vec();
            }
        }
        Ok(read > 0)
    }
}
