//! What ranks print, line by line with the rank in front.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{ChildStderr, ChildStdout};
use std::thread::JoinHandle;

use parking_lot::Mutex;

/// A longer line comes in pieces.
const LINE_BYTES: u64 = 1 << 16;

/// The threads that pass on what ranks print.
#[derive(Default)]
pub(super) struct Prefixed {
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Prefixed {
    /// Passes on what `rank` prints, until it ends.
    pub(super) fn follow(&self, rank: usize, out: ChildStdout, err: ChildStderr) -> io::Result<()> {
        let follow = |from: Box<dyn Read + Send>, to: fn(&[u8])| {
            let thread = std::thread::Builder::new().name(format!("output of rank {rank}"));
            thread.spawn(move || pass_on(rank, from, to))
        };
        let to_out = follow(Box::new(out), |line| drop(io::stdout().lock().write_all(line)))?;
        let to_err = follow(Box::new(err), |line| drop(io::stderr().lock().write_all(line)))?;
        self.threads.lock().extend([to_out, to_err]);
        Ok(())
    }

    /// Waits until everything is passed on; the ranks have ended.
    pub(super) fn finish(&self) {
        // A grandchild that outlives its rank may hold the pipe open: nobody waits for that.
        let threads = std::mem::take(&mut *self.threads.lock());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(1);
        while threads.iter().any(|thread| !thread.is_finished()) && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }
}

fn pass_on(rank: usize, from: impl Read, to: impl Fn(&[u8])) {
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
        // One write a line, so that lines of different ranks do not mix.
        to(&line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_gets_the_rank_and_an_end() {
        let seen = Mutex::new(Vec::new());
        let long = "x".repeat(LINE_BYTES as usize + 1);
        pass_on(3, format!("a\n\nb {long}").as_bytes(), |line| {
            seen.lock().push(String::from_utf8(line.to_vec()).unwrap())
        });
        let seen = seen.into_inner();
        assert_eq!(seen[..2], ["[rank 3] a\n", "[rank 3] \n"]);
        assert_eq!(seen.len(), 4);
        assert!(seen.iter().all(|line| line.starts_with("[rank 3] ") && line.ends_with('\n')));
    }
}
