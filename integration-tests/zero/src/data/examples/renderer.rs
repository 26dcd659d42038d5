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
//! Parent and worker exchange frames: a length in 4 little-endian bytes, then JSON. The first is a
//! [`TemplateSource`], which is answered by a `Result<(), String>`; the others are [`Request`]s,
//! answered by a `Result<Rendered, String>`.

use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use minijinja::Value;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::template::{ChatTemplate, Rendered, TemplateSource};
use super::worker::{self, RENDERING_SECONDS, WORKER_BYTES};
use crate::data::DataError;
use crate::error::CliError;

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

    /// As [`ChatTemplate::render`].
    pub(super) fn render(
        &self,
        messages: &[Value],
        given: usize,
        tools: Option<&Value>,
    ) -> Result<Rendered, String> {
        match self {
            Self::Here(template) => template.render(messages, given, tools),
            Self::Apart(workers) => workers.render(&Request {
                messages: messages.to_vec(),
                given,
                tools: tools.cloned(),
            }),
        }
    }
}

/// A conversation to render.
#[derive(Serialize, Deserialize)]
struct Request {
    messages: Vec<Value>,
    given: usize,
    tools: Option<Value>,
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
        let opening = to_frame(source).map_err(|e| failed(e.to_string()))?;
        let first = Worker::start(&opening).map_err(failed)?;
        Ok(Self {
            path: source.path.clone(),
            opening,
            idle: Mutex::new(vec![first]),
        })
    }

    fn render(&self, request: &Request) -> Result<Rendered, String> {
        let named = |why: String| format!("the chat template {}: {why}", self.path.display());
        let frame = to_frame(request).map_err(|e| named(e.to_string()))?;
        let idle = self.idle.lock().pop();
        let mut worker = match idle {
            Some(worker) => worker,
            None => Worker::start(&self.opening).map_err(named)?,
        };
        let reply = worker.call(&frame).map_err(named)?;
        self.idle.lock().push(worker);
        reply
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
        worker.call::<()>(opening)??;
        Ok(worker)
    }

    /// Sends a frame and returns the reply. The error is the reason for a missing reply.
    fn call<T: DeserializeOwned>(&mut self, frame: &[u8]) -> Result<Result<T, String>, String> {
        let limit = max_reply_bytes(frame.len());
        let sent = self
            .requests
            .as_mut()
            .map(|requests| requests.write_all(frame));
        let sent = sent.unwrap_or(Ok(()));
        let reply = sent.and_then(|()| read_frame(&mut self.replies, limit));
        match reply {
            Ok(Frame::Whole(reply)) => {
                serde_json::from_slice(&reply).map_err(|e| format!("a malformed reply: {e}"))
            }
            Ok(Frame::TooLong(bytes)) => Err(format!(
                "it makes {bytes} bytes of a conversation of {}; at most {limit} are supported",
                frame.len()
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
pub fn serve_templates() -> Result<(), CliError> {
    worker::begin_worker().map_err(CliError::failure)?;
    serve(&mut io::stdin().lock(), &mut io::stdout().lock()).map_err(CliError::failure)
}

fn serve(requests: &mut impl Read, replies: &mut impl Write) -> io::Result<()> {
    let Some(source) = read_value::<TemplateSource>(requests)? else {
        return Ok(());
    };
    worker::start_of_rendering();
    let template = match source.compile() {
        Ok(template) => template,
        Err(error) => {
            let message = match error {
                DataError::Template { message, .. } => message,
                other => other.to_string(),
            };
            return replies.write_all(&to_frame(&Err::<(), String>(message))?);
        }
    };
    replies.write_all(&to_frame(&Ok::<(), String>(()))?)?;
    replies.flush()?;

    while let Some(request) = read_value::<Request>(requests)? {
        let Request {
            messages,
            given,
            tools,
        } = request;
        let render = || template.render(&messages, given, tools.as_ref());
        // The template is not changed by rendering.
        let rendered = catch_unwind(AssertUnwindSafe(render));
        let rendered = rendered.unwrap_or_else(|_| Err("its rendering panics".to_owned()));
        replies.write_all(&to_frame(&rendered)?)?;
        replies.flush()?;
    }
    Ok(())
}

/// A value as JSON, behind its length.
fn to_frame(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, value)?;
    let len = u32::try_from(frame.len() - 4);
    let len = len.map_err(|_| io::Error::other("more than 4 GiB of JSON"))?;
    frame[..4].copy_from_slice(&len.to_le_bytes());
    Ok(frame)
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

/// The next value of the parent; `None` at the end.
fn read_value<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<T>> {
    match read_frame(from, u32::MAX as usize)? {
        Frame::Whole(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
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
    use serde_json::json;

    use super::*;

    /// A folder with this template.
    fn source(template: &str) -> TemplateSource {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
        TemplateSource::read(dir.path(), 0).unwrap().unwrap()
    }

    fn request() -> Request {
        let messages = json!([
            {"role": "user", "content": "a", "n": 12_345_678_901_234_567_890_u64, "x": 0.1},
            {"role": "assistant", "content": "b", "z": null, "y": [true]},
        ]);
        Request {
            messages: serde_json::from_value(messages).unwrap(),
            given: 0,
            tools: None,
        }
    }

    /// The replies of a worker to frames.
    fn replies(frames: &[Vec<u8>]) -> Vec<Value> {
        let mut out = Vec::new();
        serve(&mut &frames.concat()[..], &mut out).unwrap();
        let mut rest = &out[..];
        let mut replies = Vec::new();
        while let Some(reply) = read_value(&mut rest).unwrap() {
            replies.push(reply);
        }
        replies
    }

    #[test]
    fn worker_renders_as_the_process_itself() {
        let template = "{% for m in messages %}{{ m | tojson }}\n{% endfor %}";
        let own = source(template).compile().unwrap();
        let Request { messages, .. } = request();
        let own = own.render(&messages, 0, None).unwrap();

        let request = to_frame(&request()).unwrap();
        let frames = [
            to_frame(&source(template)).unwrap(),
            request.clone(),
            request,
        ];
        let replies = replies(&frames);
        assert_eq!(replies.len(), 3);
        for reply in &replies[1..] {
            let reply = reply.get_attr("Ok").unwrap();
            assert_eq!(reply.get_attr("text").unwrap().as_str(), Some(&*own.text));
        }
    }

    #[test]
    fn errors_are_replies() {
        let invalid = replies(&[to_frame(&source("{% if %}")).unwrap()]);
        assert!(!invalid[0].get_attr("Err").unwrap().is_undefined());
        let raises = source("{{ raise_exception('no tools') }}");
        let replies = replies(&[to_frame(&raises).unwrap(), to_frame(&request()).unwrap()]);
        let error = replies[1].get_attr("Err").unwrap().to_string();
        assert!(error.contains("no tools"), "{error}");
    }

    #[test]
    fn long_frame_is_not_read() {
        let frame = to_frame(&"0123456789").unwrap();
        assert!(matches!(
            read_frame(&mut &frame[..], 11),
            Ok(Frame::TooLong(12))
        ));
        assert!(matches!(
            read_frame(&mut &frame[..], 12),
            Ok(Frame::Whole(_))
        ));
        assert!(matches!(read_frame(&mut &frame[..2], 12), Ok(Frame::End)));
        assert!(read_frame(&mut &frame[..6], 12).is_err());
    }
}
