//! Forwards the output of ranks, each line with the rank as a prefix.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{ChildStderr, ChildStdout};
use std::thread::JoinHandle;

use parking_lot::Mutex;

/// Maximum length of a forwarded line; longer lines are split.
const LINE_BYTES: u64 = 1 << 16;
/// Timeout for the end of the output: a process that a rank started may outlive it and keep its
/// output open.
const LIMIT: std::time::Duration = std::time::Duration::from_secs(10);

/// The threads that forward the output of ranks.
#[derive(Default)]
pub(super) struct Prefixed {
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Prefixed {
    /// Forwards the output of `rank` until it is closed.
    pub(super) fn follow(&self, rank: usize, out: ChildStdout, err: ChildStderr) -> io::Result<()> {
        let follow = |from: Box<dyn Read + Send>, to: fn(&[u8])| {
            let thread = std::thread::Builder::new().name(format!("output of rank {rank}"));
            thread.spawn(move || forward(rank, from, to))
        };
        let to_out = follow(Box::new(out), |line| {
            drop(io::stdout().lock().write_all(line))
        })?;
        let to_err = follow(Box::new(err), |line| {
            drop(io::stderr().lock().write_all(line))
        })?;
        self.threads.lock().extend([to_out, to_err]);
        Ok(())
    }

    /// Waits until all output is forwarded, for at most [`LIMIT`]. Call it when the ranks have
    /// ended.
    pub(super) fn finish(&self) {
        let threads = std::mem::take(&mut *self.threads.lock());
        let deadline = std::time::Instant::now() + LIMIT;
        while threads.iter().any(|thread| !thread.is_finished())
            && std::time::Instant::now() < deadline
        {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }
}

fn forward(rank: usize, from: impl Read, to: impl Fn(&[u8])) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend(format!("[rank {rank}] ").into_bytes());
        let prefix = line.len();
        match from.by_ref().take(LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) if line.len() > prefix => {}
            Ok(_) => return,
        }
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        // One write per line, so that lines of different ranks do not mix.
        to(&line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_get_prefix_and_line_break() {
        let seen = Mutex::new(Vec::new());
        let long = "x".repeat(LINE_BYTES as usize + 1);
        forward(3, format!("a\n\nb {long}").as_bytes(), |line| {
            seen.lock().push(String::from_utf8(line.to_vec()).unwrap())
        });
        let seen = seen.into_inner();
        assert_eq!(seen[..2], ["[rank 3] a\n", "[rank 3] \n"]);
        assert_eq!(seen.len(), 4);
        assert!(
            seen.iter()
                .all(|line| line.starts_with("[rank 3] ") && line.ends_with('\n'))
        );
    }
}
