//! A hostile client against the rendezvous and against a running world, over sockets of this
//! machine.
//!
//! Rank 0, which contains the coordinator, is a child process, so that its memory, threads and
//! descriptors can be counted. The other ranks and the strangers are threads of the test. A
//! stranger's bytes depend on its seed only. The job's own memory is bounded too: it makes a fixed
//! number of calls.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use zero_comm::CommError;
use zero_comm::world::testing::{self, ID, LONG, Rank, first_frame, free_port};
use zero_comm::world::{Ranks, Token};

const WORLD_SIZE: usize = 4;
/// Calls of one step, and steps of a job.
const CALLS: usize = 20;
const STEPS: usize = 20;
const TOKEN: &str = "a secret of the tests";
const OTHER_TOKEN: &str = "a secret of others";
/// The environment variable with rank 0's port.
const PORT: &str = "ZERO_HOSTILE_PORT";
/// The start of rank 0's lines; the test harness prints others.
const PREFIX: &str = "rank 0: ";

/// Counts the bytes that are allocated.
struct Heap;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);
static PEAK_BYTES: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static HEAP: Heap = Heap;

// SAFETY: all memory is the system allocator's, which is called with the same arguments.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE_BYTES.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK_BYTES.fetch_max(live, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise; `alloc` returned the system's memory.
        unsafe { System.dealloc(ptr, layout) }
    }
}

fn rank_of(rank: usize, port: u16, token: &str) -> Ranks {
    testing::ranks(rank, WORLD_SIZE, port).token(Some(Token::new(token).unwrap()))
}

/// One step of a rank: equal calls, and a split, which all ranks complete through the coordinator.
fn step(rank: &Rank) -> Result<(), CommError> {
    rank.broadcast(0..CALLS)?;
    rank.split()
}

/// A call that differs on rank 2; returns the failure of the world.
fn differ(rank: &Rank, index: usize) -> CommError {
    rank.start_broadcast(if index == 2 { 9 } else { 8 });
    rank.wait_for_failure()
}

/// Rank 0 as a process of its own: does what the lines of its standard input say.
#[test]
#[ignore = "the other tests start it"]
fn rank_0() {
    let Ok(port) = std::env::var(PORT) else {
        return;
    };
    let rank = Rank::join(&rank_of(0, port.parse().unwrap(), TOKEN), LONG).unwrap();
    println!("\n{PREFIX}joined");
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "step" => println!("{PREFIX}{:?}", step(&rank)),
            "differ" => println!("{PREFIX}{}", differ(&rank, 0)),
            _ => break,
        }
    }
    rank.end();
    println!("{PREFIX}{}", PEAK_BYTES.load(Ordering::Relaxed));
}

/// What rank 0's process used at most.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    heap_bytes: usize,
    threads: usize,
    descriptors: usize,
}

/// Rank 0's process.
struct RankZero {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    /// Samples threads and descriptors until the process ends.
    sampler: JoinHandle<Use>,
}

impl RankZero {
    fn start(port: u16) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "--nocapture", "rank_0"])
            .env(PORT, port.to_string());
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());

        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some(text) = line.strip_prefix(PREFIX) {
                    let _ = sender.send(text.to_owned());
                }
            }
        });

        let process = format!("/proc/{}", child.id());
        let sampler = std::thread::spawn(move || {
            let mut most = Use::default();
            while let Ok(status) = std::fs::read_to_string(format!("{process}/status")) {
                let threads = status
                    .lines()
                    .find_map(|line| line.strip_prefix("Threads:")?.trim().parse().ok());
                // A zombie has no descriptors.
                let descriptors =
                    std::fs::read_dir(format!("{process}/fd")).map_or(0, Iterator::count);
                most.threads = most.threads.max(threads.unwrap_or(0));
                most.descriptors = most.descriptors.max(descriptors);
                std::thread::sleep(Duration::from_millis(1));
            }
            most
        });

        Self {
            stdin: child.stdin.take(),
            child,
            lines,
            sampler,
        }
    }

    fn send(&mut self, line: &str) {
        writeln!(self.stdin.as_ref().unwrap(), "{line}").unwrap();
    }

    fn receive(&mut self) -> String {
        let line = self.lines.recv_timeout(2 * LONG);
        line.unwrap_or_else(|_| panic!("rank 0 did not answer: {:?}", self.child.try_wait()))
    }

    fn end(mut self) -> Use {
        drop(self.stdin.take());
        let heap_bytes = self.receive().parse().unwrap();
        assert!(self.child.wait().unwrap().success());
        Use {
            heap_bytes,
            ..self.sampler.join().unwrap()
        }
    }
}

/// A world: rank 0's process, and ranks from 1 on.
struct Job {
    rank_0: RankZero,
    ranks: Vec<Rank>,
}

impl Job {
    /// Joins the ranks from 1 on, which connect to `port`, but rank 1 to `port_of_1`.
    fn join(mut rank_0: RankZero, port: u16, port_of_1: u16) -> Self {
        let join = |rank| {
            Rank::join(
                &rank_of(rank, if rank == 1 { port_of_1 } else { port }, TOKEN),
                LONG,
            )
            .unwrap()
        };
        let ranks = on_threads(1..WORLD_SIZE, join);
        assert_eq!(rank_0.receive(), "joined");
        Self { rank_0, ranks }
    }

    fn steps(&mut self, steps: usize) {
        for _ in 0..steps {
            self.rank_0.send("step");
            for result in on_threads(&self.ranks, step) {
                assert_eq!(result, Ok(()));
            }
            assert_eq!(self.rank_0.receive(), "Ok(())");
        }
    }

    /// Ends all ranks without a failure.
    fn end(self) -> Use {
        let used = std::thread::spawn(|| self.rank_0.end());
        self.ranks.into_iter().for_each(Rank::end);
        used.join().unwrap()
    }

    /// Ends all ranks with a mismatch, which all must name.
    fn differ(mut self) -> Use {
        self.rank_0.send("differ");
        let errors = on_threads(self.ranks.iter().enumerate(), |(index, rank)| {
            differ(rank, index + 1)
        });
        let first = self.rank_0.receive();
        assert!(
            errors.iter().all(|error| error.to_string() == first),
            "{first} {errors:?}"
        );
        let CommError::Mismatch {
            rank, other_rank, ..
        } = errors[0]
        else {
            panic!("{first}")
        };
        assert!((rank == 2) != (other_rank == 2), "{first}");
        drop(self.ranks);
        self.rank_0.end()
    }
}

/// Runs `body` on a thread for each item.
fn on_threads<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    body: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = items
            .into_iter()
            .map(|item| scope.spawn(move || body(item)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Forwards one connection to `port`; returns its own port and the bytes that the client sends.
fn record(port: u16) -> (u16, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&recorded);
    std::thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = connect(port);
        let copy = |mut from: TcpStream, mut to: TcpStream, record: Option<Arc<Mutex<Vec<u8>>>>| {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = from.read(&mut bytes) {
                if let Some(record) = &record {
                    record.lock().unwrap().extend(&bytes[..n]);
                }
                if to.write_all(&bytes[..n]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Write);
        };
        let client_2 = client.try_clone().unwrap();
        let server_2 = server.try_clone().unwrap();
        std::thread::spawn(move || copy(server_2, client_2, None));
        copy(client, server, Some(record));
    });

    (own, recorded)
}

/// Connects to `port` as soon as something listens there.
fn connect(port: u16) -> TcpStream {
    let begun = Instant::now();
    loop {
        match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A splitmix64 generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Up to 8 KiB.
    fn noise(&mut self) -> Vec<u8> {
        let len = 1 << self.below(14);
        (0..len).map(|_| self.next() as u8).collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Random bytes.
    Noise,
    /// A web browser.
    Http,
    /// The first frame of a rank, cut off.
    Truncated,
    /// The first frame of a rank, damaged.
    Damaged,
    /// The length of a huge frame, then its bytes.
    Huge,
    /// The first frame of a rank, one byte at a time.
    Slow,
    /// Nothing.
    Silent,
    /// The right protocol with another token.
    WrongToken,
    /// The right protocol without a token.
    NoToken,
    /// The bytes of a rank of an earlier world with the same token.
    Replay,
    /// The first frame of that rank, then random bytes.
    ReplayThenNoise,
    /// The first frame of that rank, then as many bytes as the coordinator accepts; reads nothing.
    Unread,
}

use Kind::{
    Damaged, Http, Huge, NoToken, Noise, Replay, ReplayThenNoise, Silent, Slow, Truncated, Unread,
    WrongToken,
};

const KINDS: [Kind; 12] = [
    Noise,
    Http,
    Truncated,
    Damaged,
    Huge,
    Slow,
    Silent,
    WrongToken,
    NoToken,
    Replay,
    ReplayThenNoise,
    Unread,
];

#[derive(Clone, Copy, Debug)]
struct Stranger {
    kind: Kind,
    seed: u64,
}

impl Stranger {
    /// Strangers of all kinds.
    fn all(seed: u64, each: usize) -> Vec<Self> {
        let one = |index| Self {
            kind: KINDS[index % KINDS.len()],
            seed: seed << 32 | index as u64,
        };
        (0..each * KINDS.len()).map(one).collect()
    }

    /// Connects, waits for `go`, and talks to the coordinator until it closes the connection or
    /// `over` is true. Returns the bytes received.
    fn run(
        self,
        port: u16,
        capture: &[u8],
        Signals {
            connected,
            go,
            over,
        }: &Signals,
    ) -> Vec<u8> {
        let random = &mut Random(self.seed);

        // Nothing listens before rank 0 starts, and perhaps nothing once the world is complete.
        let mut stream = loop {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                Ok(stream) => break stream,
                Err(_) if over.load(Ordering::Relaxed) => return Vec::new(),
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        };

        connected.fetch_add(1, Ordering::Relaxed);
        while !go.load(Ordering::Relaxed) && !over.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(2));
        }
        stream
            .set_write_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        stream
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        let first = &capture[..4 + u32::from_le_bytes(*capture.first_chunk().unwrap()) as usize];

        let send = |bytes: &[u8]| {
            let mut sent = 0;
            while sent < bytes.len() && !over.load(Ordering::Relaxed) {
                match (&stream).write(&bytes[sent..]) {
                    Ok(n) => sent += n,
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                    // The coordinator closed the connection.
                    Err(_) => return false,
                }
            }
            sent == bytes.len()
        };

        match self.kind {
            Noise => drop(send(&random.noise())),
            Http => drop(send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")),
            Truncated => {
                send(&first[..random.below(first.len())]);
                if random.below(2) == 0 {
                    let _ = stream.shutdown(Shutdown::Write);
                }
            }
            Damaged => {
                let mut bytes = capture.to_vec();
                // Not the length.
                bytes[4 + random.below(first.len() - 4)] ^= 1 << random.below(8);
                send(&bytes);
            }
            Huge => {
                let lens = [u32::MAX, 1 << 31, 1 << 26, 1 << 22, 1 << 20, 1 << 16, 65];
                send(&lens[random.below(lens.len())].to_le_bytes());
                let chunk = vec![0; 1 << 16];
                for _ in 0..128 {
                    if !send(&chunk) {
                        break;
                    }
                }
            }
            Slow => {
                let last = first.len() - 1;
                let bytes = [&first[..last], &[!first[last]]].concat();
                for byte in bytes {
                    if !send(&[byte]) {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
            Silent => {}
            WrongToken | NoToken => {
                let token = if self.kind == NoToken {
                    "none"
                } else {
                    OTHER_TOKEN
                };
                send(&first_frame(&rank_of(
                    1 + random.below(WORLD_SIZE - 1),
                    port,
                    token,
                )));
                send(&capture[first.len()..]);
            }
            Replay => drop(send(
                &capture[..first.len() + random.below(capture.len() - first.len() + 1)],
            )),
            ReplayThenNoise => {
                send(first);
                send(&random.noise());
            }
            Unread => {
                send(first);
                let chunk = [0xff; 1 << 12];
                while send(&chunk) && !over.load(Ordering::Relaxed) {}
                return Vec::new();
            }
        }

        let mut received = Vec::new();
        let mut bytes = [0; 4096];
        while !over.load(Ordering::Relaxed) && received.len() < 1 << 20 {
            match stream.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => received.extend(&bytes[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
        }

        received
    }

    /// Checks what the coordinator sent to it.
    fn check(self, received: &[u8]) {
        let most = match self.kind {
            // A challenge.
            Replay | ReplayThenNoise => 4 + testing::MAX_HELLO_BYTES,
            _ => 0,
        };
        assert!(
            received.len() <= most,
            "{self:?} received {} bytes: {received:?}",
            received.len()
        );
        assert!(
            !received.windows(ID.len()).any(|bytes| bytes == ID),
            "{self:?} received the id"
        );
    }
}

/// What a test and its strangers tell each other.
#[derive(Default)]
struct Signals {
    connected: AtomicUsize,
    go: AtomicBool,
    over: AtomicBool,
}

/// Strangers at work.
struct Wave {
    threads: Vec<(Stranger, JoinHandle<Vec<u8>>)>,
    signals: Arc<Signals>,
}

impl Wave {
    /// Starts strangers that connect and wait for `go`.
    fn waiting(strangers: Vec<Stranger>, port: u16, capture: &[u8]) -> Self {
        let signals = Arc::new(Signals::default());
        let capture = Arc::new(capture.to_vec());
        let start = |stranger: Stranger| {
            let signals = Arc::clone(&signals);
            let capture = Arc::clone(&capture);
            (
                stranger,
                std::thread::spawn(move || stranger.run(port, &capture, &signals)),
            )
        };
        Self {
            threads: strangers.into_iter().map(start).collect(),
            signals,
        }
    }

    fn start(strangers: Vec<Stranger>, port: u16, capture: &[u8]) -> Self {
        let wave = Self::waiting(strangers, port, capture);
        wave.go();
        wave
    }

    fn wait_until_connected(&self) {
        let begun = Instant::now();
        while self.signals.connected.load(Ordering::Relaxed) < self.threads.len() {
            assert!(begun.elapsed() < LONG, "nothing listens");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn go(&self) {
        self.signals.go.store(true, Ordering::Relaxed);
    }

    /// Ends those that the coordinator has not closed, and checks what all received.
    fn end(self) {
        self.signals.over.store(true, Ordering::Relaxed);
        for (stranger, thread) in self.threads {
            stranger.check(&thread.join().unwrap());
        }
    }
}

/// A job without strangers; returns what it used, and the bytes that rank 1 sent.
fn undisturbed() -> (Use, Vec<u8>) {
    let port = free_port();
    let (port_of_1, recorded) = record(port);
    let mut job = Job::join(RankZero::start(port), port, port_of_1);
    job.steps(STEPS);
    let used = job.end();
    let bytes = recorded.lock().unwrap().clone();
    assert!(bytes.len() > 100, "{bytes:?}");
    (used, bytes)
}

/// Strangers that come before, during and after the rendezvous change nothing: all ranks join, step
/// by step all collectives and splits end, and a mismatch is still named.
#[test]
fn strangers_change_nothing() {
    let (alone, capture) = undisturbed();
    for seed in 0..4 {
        let port = free_port();
        let early = Wave::start(Stranger::all(seed * 4, 2), port, &capture);
        let rank_0 = RankZero::start(port);
        early.wait_until_connected();
        // They connect before the world is complete and send when it runs.
        let waiting = Wave::waiting(Stranger::all(seed * 4 + 1, 2), port, &capture);
        waiting.wait_until_connected();
        let during = Wave::start(Stranger::all(seed * 4 + 2, 2), port, &capture);
        let mut job = Job::join(rank_0, port, port);
        job.steps(STEPS / 2);
        waiting.go();
        let late = Wave::start(Stranger::all(seed * 4 + 3, 2), port, &capture);
        job.steps(STEPS / 2);
        let used = if seed % 2 == 0 {
            job.end()
        } else {
            job.differ()
        };
        [early, waiting, during, late]
            .into_iter()
            .for_each(Wave::end);
        check_use(alone, used);
    }
}

/// More silent connections than there are places, and more that come again and again, do not keep a
/// rank out. The silent ones are closed.
#[test]
fn crowd_keeps_no_rank_out() {
    let (alone, capture) = undisturbed();
    let port = free_port();
    let silent = |seed| {
        (0..2 * testing::places(WORLD_SIZE) as u64).map(move |i| Stranger {
            kind: Silent,
            seed: seed + i,
        })
    };

    let crowd = Wave::start(silent(0).collect(), port, &capture);
    let rank_0 = RankZero::start(port);
    crowd.wait_until_connected();
    let callers: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || {
                let refused = |_| TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err();
                (0..2000).position(refused)
            })
        })
        .collect();

    let mut job = Job::join(rank_0, port, port);
    job.steps(STEPS);
    for caller in callers {
        caller.join().unwrap();
    }
    // Without `over`: the coordinator closed them.
    for (stranger, thread) in crowd.threads {
        stranger.check(&thread.join().unwrap());
    }
    check_use(alone, job.end());
}

/// While the world waits for its ranks, silent connections are closed after a time.
#[test]
fn silent_connections_are_closed() {
    let port = free_port();
    let rank_0 = RankZero::start(port);
    let mut silent: Vec<_> = (0..3).map(|_| connect(port)).collect();
    // Bytes do not prolong it.
    silent[0].write_all(&[60, 0, 0, 0, b'z']).unwrap();
    for stream in &mut silent {
        stream.set_read_timeout(Some(LONG)).unwrap();
        let closed = stream.read(&mut [0]);
        assert!(
            matches!(closed, Ok(0))
                || closed.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset)
        );
    }
    Job::join(rank_0, port, port).end();
}

/// Bounds of what strangers can make rank 0's process use, from the coordinator's constants.
fn check_use(alone: Use, used: Use) {
    let connections = testing::places(WORLD_SIZE);
    assert!(used.threads <= alone.threads, "{used:?} {alone:?}");
    assert!(
        used.descriptors <= alone.descriptors + connections,
        "{used:?} {alone:?}"
    );
    // Calls that wait for a report differ from run to run.
    let calls = STEPS * CALLS * 1024;
    let most = alone.heap_bytes + calls + connections * testing::STRANGER_BYTES;
    assert!(used.heap_bytes <= most, "{most}: {used:?} {alone:?}");
    println!("{used:?} {alone:?}");
}
