//! Renders chat templates in separate processes.
//!
//! A template is a program of whoever made the model's folder: it may loop without end, double a
//! string sixty times, nest lists until the stack is full. Bounds on each filter, operator and
//! method would miss the next one, so the whole rendering is bounded by the system instead: the
//! binary starts itself as workers (`zero render-templates`), which may use [`RENDERING_SECONDS`]
//! of processor time for a rendering and [`WORKER_BYTES`] of memory. A worker that exceeds a limit,
//! or overflows its stack, ends, and the error names the template. A worker serves many
//! conversations.
//!
//! Processor time, not the clock: a busy machine does not make a good template fail.
//!
//! Only a program that called [`render_apart`] can be started as a worker. Others, such as unit
//! tests, render in their own process without these limits.
//!
//! Parent and worker exchange frames: a length in 4 little-endian bytes, then bytes. The first is a
//! [`TemplateSource`] as JSON; the others are lines of the data, which the worker parses. A reply
//! ends with a byte, [`DONE`] or [`FAILED`]. Before [`DONE`] is nothing, or a [`Rendered`]; before
//! [`FAILED`] a message.

use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::conversation::Conversation;
use super::template::{ChatTemplate, Rendered, TemplateSource};
use super::worker::{self, RENDERING_SECONDS, WORKER_BYTES};
use crate::DataError;

/// The argument that makes the binary a worker.
const WORKER_COMMAND: &str = "render-templates";

/// Longest reply to a request of `request_bytes`. Templates repeat tools and messages, and add text
/// of their own.
fn max_reply_bytes(request_bytes: usize) -> usize {
    request_bytes.saturating_mul(64).saturating_add(1 << 20)
}

/// Whether this program can be started as a worker.
static APART: AtomicBool = AtomicBool::new(false);

/// Renders chat templates in separate processes from now on. The program must call
/// [`serve_templates`] if its only argument is `render-templates`.
pub fn render_apart() {
    APART.store(true, Ordering::Relaxed);
}

/// Renders the template of a folder.
pub(super) enum Renderer {
    /// In this process.
    Here(Box<ChatTemplate>),
    /// In workers.
    Apart(Workers),
}

impl Renderer {
    /// Opens the template of a folder, if it has one; `now` is the time of `strftime_now`, in
    /// seconds.
    ///
    /// # Errors
    /// The template cannot be read or is not valid, or a worker cannot be started.
    pub(super) fn open(dir: &Path, now: i64) -> Result<Option<Self>, DataError> {
        let Some(source) = TemplateSource::read(dir, now)? else {
            return Ok(None);
        };
        if APART.load(Ordering::Relaxed) {
            return Workers::open(&source).map(|workers| Some(Self::Apart(workers)));
        }
        Ok(Some(Self::Here(Box::new(source.compile()?))))
    }

    /// Renders the conversation of a line. The error says what is wrong with it, or with the
    /// template.
    pub(super) fn render(&self, line: &str) -> Result<Rendered, String> {
        match self {
            Self::Here(template) => template.render(&Conversation::parse(line)?),
            Self::Apart(workers) => workers.render(line),
        }
    }
}

/// Workers for one template, as many as threads render at a time.
pub(super) struct Workers {
    path: PathBuf,
    opening: Vec<u8>,
    idle: Mutex<Vec<Worker>>,
}

impl Workers {
    fn open(source: &TemplateSource) -> Result<Self, DataError> {
        let failed = |message: String| DataError::Template {
            path: source.path.clone(),
            message,
        };
        let opening = serde_json::to_vec(source).map_err(|e| failed(e.to_string()))?;
        let first = Worker::start(&opening).map_err(failed)?;
        Ok(Self {
            path: source.path.clone(),
            opening,
            idle: Mutex::new(vec![first]),
        })
    }

    fn render(&self, line: &str) -> Result<Rendered, String> {
        let named = |why: String| format!("the chat template {}: {why}", self.path.display());
        let idle = self.idle.lock().pop();
        let mut worker = match idle {
            Some(worker) => worker,
            None => Worker::start(&self.opening).map_err(named)?,
        };
        let reply = worker.call(line.as_bytes()).map_err(named)?;
        self.idle.lock().push(worker);
        let malformed = || named("a malformed reply".to_owned());
        from_payload(&reply?).ok_or_else(malformed)
    }
}

/// A process that renders.
struct Worker {
    child: Child,
    /// `None` once the worker must end.
    requests: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
}

impl Worker {
    /// Starts a worker for the template in `opening`. The error says what is wrong with the
    /// template.
    fn start(opening: &[u8]) -> Result<Self, String> {
        let start = || -> io::Result<Self> {
            let mut child = Command::new(std::env::current_exe()?)
                .arg(WORKER_COMMAND)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()?;
            let (requests, replies) = child
                .stdin
                .take()
                .zip(child.stdout.take())
                .ok_or_else(|| io::Error::other("no pipes"))?;
            Ok(Self {
                child,
                requests: Some(requests),
                replies: BufReader::new(replies),
            })
        };
        let mut worker = start().map_err(|e| format!("failed to start a process for it: {e}"))?;
        worker.call(opening)??;
        Ok(worker)
    }

    /// Sends a request and returns the reply. The error is the reason for a missing reply.
    fn call(&mut self, request: &[u8]) -> Result<Result<Vec<u8>, String>, String> {
        let limit = max_reply_bytes(request.len());
        let sent = self
            .requests
            .as_mut()
            .map(|requests| write_frame(requests, &[], request));
        let sent = sent.unwrap_or(Ok(()));
        let reply = sent.and_then(|()| read_frame(&mut self.replies, limit));
        match reply {
            Ok(Frame::Whole(mut reply)) => match reply.pop() {
                Some(DONE) => Ok(Ok(reply)),
                _ => Ok(Err(String::from_utf8_lossy(&reply).into_owned())),
            },
            Ok(Frame::TooLong(bytes)) => Err(format!(
                "it makes {bytes} bytes of a conversation of {}; at most {limit} are supported",
                request.len()
            )),
            Ok(Frame::End) | Err(_) => Err(self.end()),
        }
    }

    /// Waits for the end of a worker that gave no reply, and returns its reason.
    fn end(&mut self) -> String {
        self.requests = None;
        match self.child.wait() {
            Ok(status) => reason(status),
            Err(error) => format!("its process is lost: {error}"),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.requests = None;
        // It may be writing a reply that nobody reads.
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

/// Why a worker ended without a reply.
fn reason(status: ExitStatus) -> String {
    match status.signal() {
        Some(libc::SIGPROF) => {
            format!("a rendering took more than {RENDERING_SECONDS} s of processor time")
        }
        Some(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS) => {
            "a rendering overflowed its stack: it nests values or calls too deeply".to_owned()
        }
        Some(signal) => format!("the process that renders it was ended by signal {signal}"),
        None => format!(
            "a rendering needs more than {} MiB of memory",
            WORKER_BYTES >> 20
        ),
    }
}

/// Serves one parent as a worker until it closes the pipe.
///
/// # Errors
/// A malformed frame, or a failed system call.
pub fn serve_templates() -> io::Result<()> {
    worker::begin_worker()?;
    serve(&mut io::stdin().lock(), &mut io::stdout().lock())
}

fn serve(requests: &mut impl Read, replies: &mut impl Write) -> io::Result<()> {
    let Some(source) = next_request(requests)? else {
        return Ok(());
    };
    let source: TemplateSource = serde_json::from_slice(&source)?;
    worker::start_of_rendering();
    let template = match source.compile() {
        Ok(template) => template,
        Err(error) => {
            let message = match error {
                DataError::Template { message, .. } => message,
                other => other.to_string(),
            };
            return reply(replies, Err(message));
        }
    };
    reply(replies, Ok(Vec::new()))?;

    while let Some(line) = next_request(requests)? {
        worker::start_of_rendering();
        let render = || {
            let line = String::from_utf8_lossy(&line);
            template.render(&Conversation::parse(&line)?)
        };
        // The template is not changed by rendering.
        let rendered = catch_unwind(AssertUnwindSafe(render));
        let rendered = rendered.unwrap_or_else(|_| Err("its rendering panics".to_owned()));
        reply(replies, rendered.map(to_payload))?;
    }
    Ok(())
}

/// Ends a reply with a result.
const DONE: u8 = 0;

/// Ends a reply that is an error's message.
const FAILED: u8 = 1;

/// Sends a reply.
fn reply(to: &mut impl Write, reply: Result<Vec<u8>, String>) -> io::Result<()> {
    let (bytes, end) = match reply {
        Ok(payload) => (payload, DONE),
        Err(message) => (message.into_bytes(), FAILED),
    };
    write_frame(to, &bytes, &[end])?;
    to.flush()
}

/// The text, then the spans and their number.
fn to_payload(rendered: Rendered) -> Vec<u8> {
    let mut bytes = rendered.text.into_bytes();
    for span in &rendered.spans {
        bytes.extend((span.start as u64).to_le_bytes());
        bytes.extend((span.end as u64).to_le_bytes());
    }
    bytes.extend((rendered.spans.len() as u64).to_le_bytes());
    bytes.push(u8::from(rendered.marked));
    bytes
}

fn from_payload(bytes: &[u8]) -> Option<Rendered> {
    let (marked, bytes) = bytes.split_last()?;
    let (bytes, number) = bytes.split_last_chunk()?;
    let number = usize::try_from(u64::from_le_bytes(*number)).ok()?;
    let text_len = bytes.len().checked_sub(number.checked_mul(16)?)?;
    let (text, spans) = bytes.split_at(text_len);
    let place = |at: usize| Some(u64::from_le_bytes(*spans[at..].first_chunk()?) as usize);
    let spans = (0..number).map(|index| Some(place(16 * index)?..place(16 * index + 8)?));
    Some(Rendered {
        text: String::from_utf8(text.to_vec()).ok()?,
        spans: spans.collect::<Option<_>>()?,
        marked: *marked != 0,
    })
}

/// Writes two parts as one frame.
fn write_frame(to: &mut impl Write, first: &[u8], second: &[u8]) -> io::Result<()> {
    let len = u32::try_from(first.len() + second.len());
    let len = len.map_err(|_| io::Error::other("more than 4 GiB of text"))?;
    let mut frame = Vec::with_capacity(4 + len as usize);
    frame.extend(len.to_le_bytes());
    frame.extend(first);
    frame.extend(second);
    to.write_all(&frame)
}

/// A read of a pipe.
enum Frame {
    Whole(Vec<u8>),
    /// Its length, above the limit.
    TooLong(usize),
    /// The other end was closed.
    End,
}

fn read_frame(from: &mut impl Read, limit: usize) -> io::Result<Frame> {
    let mut len = [0; 4];
    match from.read_exact(&mut len) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Frame::End),
        other => other?,
    }
    let len = u32::from_le_bytes(len) as usize;
    if len > limit {
        return Ok(Frame::TooLong(len));
    }
    let mut bytes = vec![0; len];
    from.read_exact(&mut bytes)?;
    Ok(Frame::Whole(bytes))
}

/// The next frame of the parent; `None` at the end.
fn next_request(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    match read_frame(from, u32::MAX as usize)? {
        Frame::Whole(bytes) => Ok(Some(bytes)),
        Frame::TooLong(_) | Frame::End => Ok(None),
    }
}

impl fmt::Debug for Renderer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Here(template) => template.fmt(f),
            Self::Apart(workers) => write!(f, "Renderer({})", workers.path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"messages": [
        {"role": "user", "content": "a", "n": 12345678901234567890, "x": 0.1},
        {"role": "assistant", "content": "bä", "y": [true]}
    ]}"#;

    /// A folder with this template.
    fn source(template: &str) -> TemplateSource {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
        TemplateSource::read(dir.path(), 0).unwrap().unwrap()
    }

    fn frame(bytes: &[u8]) -> Vec<u8> {
        let mut frame = Vec::new();
        write_frame(&mut frame, bytes, &[]).unwrap();
        frame
    }

    /// The replies of a worker for a template to lines.
    fn replies(template: &str, lines: &[&str]) -> Vec<Vec<u8>> {
        let mut requests = frame(&serde_json::to_vec(&source(template)).unwrap());
        for line in lines {
            requests.extend(frame(line.as_bytes()));
        }
        let mut out = Vec::new();
        serve(&mut &requests[..], &mut out).unwrap();
        let mut rest = &out[..];
        let mut replies = Vec::new();
        while let Some(reply) = next_request(&mut rest).unwrap() {
            replies.push(reply);
        }
        replies
    }

    #[test]
    fn worker_renders_as_the_process_itself() {
        let plain = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}";
        let marked = "{% generation %}a{% endgeneration %}b{% generation %}c{% endgeneration %}";
        for template in [plain, marked, ""] {
            let own = source(template).compile().unwrap();
            let own = own.render(&Conversation::parse(LINE).unwrap()).unwrap();
            let replies = replies(template, &[LINE, LINE]);
            assert_eq!(replies.len(), 3);
            for reply in &replies[1..] {
                let (end, payload) = reply.split_last().unwrap();
                assert_eq!(*end, DONE);
                assert_eq!(from_payload(payload).as_ref(), Some(&own));
            }
        }
    }

    #[test]
    fn errors_are_replies() {
        let error = |template, at: usize| {
            let reply = replies(template, &["{\"messages\": []}", LINE]).swap_remove(at);
            let (end, message) = reply.split_last().unwrap();
            assert_eq!(*end, FAILED);
            String::from_utf8(message.to_vec()).unwrap()
        };
        assert!(error("{% if %}", 0).contains("line 1"));
        let raises = "{{ raise_exception('no tools') }}";
        assert!(error(raises, 1).contains("`messages` has no message"));
        assert!(error(raises, 2).contains("no tools"));
    }

    #[test]
    fn cut_payload_is_an_error() {
        let rendered = Rendered {
            text: "text".to_owned(),
            spans: std::iter::once(1..3).collect(),
            marked: false,
        };
        let payload = to_payload(rendered);
        for start in 5..payload.len() {
            assert_eq!(from_payload(&payload[start..]), None, "{start}");
        }
    }

    #[test]
    fn long_frame_is_not_read() {
        let frame = frame(b"0123456789");
        assert!(matches!(
            read_frame(&mut &frame[..], 9),
            Ok(Frame::TooLong(10))
        ));
        assert!(matches!(
            read_frame(&mut &frame[..], 10),
            Ok(Frame::Whole(_))
        ));
        assert!(matches!(read_frame(&mut &frame[..2], 10), Ok(Frame::End)));
        assert!(read_frame(&mut &frame[..6], 10).is_err());
    }
}
