//! The cost of the coordinator of N ranks: `control_plane [RANKS [STEPS [CALLS [STEP_MS]]]]`, by
//! default 64, 1,024 and 4,096 ranks, 100 steps of 3,000 calls and 1 s each.
//!
//! The coordinator runs alone in a second process. This process has one connection for each rank,
//! all on one thread: the clients speak the protocol, but run no collectives. Each reports as often
//! as a rank's watcher does. The program prints a table (benches/README.md has the newest figures)
//! and fails if a count breaks its law:
//!
//! - all ranks join;
//! - a rank sends one report an interval, of at most [`REPORT_BYTES`];
//! - a split costs one message of at most [`PLACE_BYTES`] for each rank;
//! - of a mismatch, the rank whose call differs and rank 0 are named, on all ranks.

use std::error::Error;
use std::io::{BufRead, BufReader, Lines, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use zero_comm::CommError;
use zero_comm::world::testing::clients::{Clients, Event, Script, Traffic, start_coordinator};
use zero_comm::world::testing::free_port;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Largest report of this program's clients: its length, the variant, a communicator, three numbers
/// of at most 10 bytes, and a call with its hash.
const REPORT_BYTES: u64 = 4 + 1 + 5 + 3 * 10 + 1 + 16 + 10;
/// Largest answer to a split: its length, two variants, an option, two communicators, and three
/// numbers.
const PLACE_BYTES: u64 = 4 + 3 + 2 * 5 + 3 * 10;
/// Largest time between a differing call and its error at all ranks.
const MISMATCH_LIMIT: Duration = Duration::from_secs(2);
/// Limit of a wait.
const LIMIT: Duration = Duration::from_secs(120);

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [mode, n, port] = &args[..]
        && mode == "coordinator"
    {
        return coordinate(n.parse()?, port.parse()?);
    }
    let number =
        |index: usize, default: usize| args.get(index).map_or(Ok(default), |text| text.parse());
    let steps = number(1, 100)?;
    let calls = number(2, 3000)?;
    let step_ms = number(3, 1000)?;
    println!(
        "| ranks | all joined, s | steps: of one core | messages/s, bytes/s in | out | resident, MiB | \
         split, ms | bytes out a rank | mismatch named on all, s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let sizes = if args.is_empty() {
        vec![64, 1024, 4096]
    } else {
        vec![number(0, 64)?]
    };

    for n in sizes {
        probe(
            n,
            steps,
            calls as u64,
            Duration::from_millis(step_ms as u64),
        )?;
    }

    Ok(())
}

/// The coordinator's process: reports its use for each line of its input.
fn coordinate(n: usize, port: u16) -> Result<()> {
    start_coordinator(n, port)?;
    println!("ready");
    for _ in std::io::stdin().lines() {
        let mut cpu_ns = 0;
        for task in std::fs::read_dir("/proc/self/task")? {
            let stat = std::fs::read_to_string(task?.path().join("schedstat"))?;
            cpu_ns += stat.split(' ').next().unwrap_or_default().parse::<u64>()?;
        }
        let status = std::fs::read_to_string("/proc/self/status")?;
        let resident = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .ok_or("no VmHWM")?;
        println!("{cpu_ns} {}", resident.trim().trim_end_matches(" kB"));
    }
    Ok(())
}

struct Coordinator {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Coordinator {
    fn start(n: usize, port: u16) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["coordinator", &n.to_string(), &port.to_string()]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take().ok_or("no stdin")?;
        let stdout = child.stdout.take().ok_or("no stdout")?;
        let mut coordinator = Self {
            child,
            stdin,
            lines: BufReader::new(stdout).lines(),
        };
        coordinator.line()?;
        Ok(coordinator)
    }

    fn line(&mut self) -> Result<String> {
        Ok(self
            .lines
            .next()
            .ok_or("the coordinator's process ended")??)
    }

    /// Its processor time in seconds, and its largest resident memory in MiB, so far.
    fn usage(&mut self) -> Result<(f64, f64)> {
        writeln!(self.stdin)?;
        let line = self.line()?;
        let (cpu_ns, resident_kib) = line.split_once(' ').ok_or("a line of two numbers")?;
        Ok((
            cpu_ns.parse::<f64>()? / 1e9,
            resident_kib.parse::<f64>()? / 1024.0,
        ))
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Receives once; an error if a connection ended or the world failed, but for a mismatch.
fn next(clients: &mut Clients, wait: Duration) -> Result<Vec<(usize, Event)>> {
    let events = clients.receive(wait)?;
    for (rank, event) in &events {
        match event {
            Event::Failed(CommError::Mismatch { .. }) => {}
            Event::Failed(error) => return Err(error.clone().into()),
            Event::Ended(cause) => {
                // The coordinator sends the cause to the other ranks.
                let later = clients.receive(Duration::from_secs(1))?;
                let failed = later
                    .into_iter()
                    .find(|(_, event)| matches!(event, Event::Failed(_)));
                return Err(
                    format!("the connection of rank {rank} ended: {cause}; {failed:?}").into(),
                );
            }
            _ => {}
        }
    }
    Ok(events)
}

/// Receives until `done` of the events so far, for at most [`LIMIT`].
fn receive(clients: &mut Clients, mut done: impl FnMut(usize, Event) -> bool) -> Result<Duration> {
    let begun = Instant::now();
    loop {
        for (rank, event) in next(clients, Duration::from_millis(10))? {
            if done(rank, event) {
                return Ok(begun.elapsed());
            }
        }
        if begun.elapsed() > LIMIT {
            return Err(format!("no answer within {LIMIT:?}").into());
        }
    }
}

fn difference(after: Traffic, before: Traffic) -> Traffic {
    Traffic {
        sent: after.sent - before.sent,
        sent_bytes: after.sent_bytes - before.sent_bytes,
        received: after.received - before.received,
        received_bytes: after.received_bytes - before.received_bytes,
    }
}

fn check(holds: bool, law: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(law.into()) }
}

fn probe(n: usize, steps: usize, calls: u64, step: Duration) -> Result<()> {
    let port = free_port();
    let mut coordinator = Coordinator::start(n, port)?;
    let mut script = Script::default();

    let begun = Instant::now();
    let mut clients = Clients::connect(n, port)?;
    let mut joined = 0;
    let mut every = Duration::ZERO;
    receive(&mut clients, |_, event| {
        if let Event::Joined(report_every) = event {
            (joined, every) = (joined + 1, report_every);
        }
        joined == n
    })?;

    let join_s = begun.elapsed().as_secs_f64();

    // Steps.
    let (cpu_before, _) = coordinator.usage()?;
    let before = clients.traffic();
    let begun = Instant::now();
    let total = steps as u64 * calls;
    let mut due: Vec<Instant> = vec![begun + every; n];
    let mut reports = 0u64;
    loop {
        let now = Instant::now();
        let pace = (now - begun).as_secs_f64() / step.as_secs_f64() * calls as f64;
        while script.count() < (pace as u64).min(total) {
            script.call((script.count() % calls) as usize);
        }
        let ended = script.count() == total;
        for (rank, due) in due.iter_mut().enumerate() {
            if now >= *due || ended {
                clients.report(rank, &script)?;
                (*due, reports) = (now + every, reports + 1);
            }
        }
        next(&mut clients, Duration::from_millis(5))?;
        if ended {
            break;
        }
    }

    let wall = begun.elapsed().as_secs_f64();
    let traffic = difference(clients.traffic(), before);
    let (cpu_after, resident_mib) = coordinator.usage()?;
    check(traffic.sent <= reports, "one message a report")?;
    check(
        traffic.sent_bytes <= reports * REPORT_BYTES,
        "a report's bytes",
    )?;
    let seconds = wall.ceil() as u64 + 1;
    check(
        traffic.received <= 2 * n as u64 * seconds,
        "two messages a second to each rank",
    )?;

    // A split.
    let before = clients.traffic();
    let mut places = 0;
    let begun = Instant::now();
    for rank in 0..n {
        clients.split(rank)?;
    }
    let mut wrong = None;

    receive(&mut clients, |rank, event| {
        if let Event::Split(place) = event {
            places += 1;
            // The key is the reverse of the rank.
            let size = (n + 1 - rank % 2) / 2;
            if place != Some((size - 1 - rank / 2, size)) {
                wrong = Some(format!("rank {rank}: {place:?}"));
            }
        }
        places == n
    })?;

    let split_ms = begun.elapsed().as_secs_f64() * 1e3;
    check(wrong.is_none(), &format!("places of the split: {wrong:?}"))?;
    let split = difference(clients.traffic(), before);
    // A keepalive may be among them.
    check(
        split.received_bytes <= n as u64 * (PLACE_BYTES + 16 * (2 + split_ms as u64 / 1000)),
        "a place a rank",
    )?;

    // A mismatch: ranks report when they are due.
    let culprit = n / 2;
    let mut other = script.clone();
    script.call(1);
    other.call(2);
    let of = |rank| if rank == culprit { &other } else { &script };
    let begun = Instant::now();
    let due: Vec<Instant> = due
        .iter()
        .map(|&due| due.clamp(begun, begun + every))
        .collect();
    let mut told = 0;
    let mut sent = vec![false; n];

    while told < n {
        let now = Instant::now();
        for rank in 0..n {
            if now >= due[rank] && !std::mem::replace(&mut sent[rank], true) {
                clients.report(rank, of(rank))?;
            }
        }
        for (_, event) in next(&mut clients, Duration::from_millis(5))? {
            let Event::Failed(error) = event else {
                continue;
            };
            let CommError::Mismatch {
                rank, other_rank, ..
            } = error
            else {
                return Err(error.into());
            };
            check(
                [rank, other_rank] == [culprit, 0] || [rank, other_rank] == [0, culprit],
                "the ranks of a mismatch",
            )?;
            told += 1;
        }
        check(begun.elapsed() < LIMIT, "the mismatch is named")?;
    }

    let mismatch = begun.elapsed();

    println!(
        "| {n} | {join_s:.2} | {:.2}% | {:.0}, {:.0} kB | {:.0}, {:.0} kB | {resident_mib:.1} | {split_ms:.1} | {:.0} | {:.2} |",
        (cpu_after - cpu_before) / wall * 100.0,
        traffic.sent as f64 / wall,
        traffic.sent_bytes as f64 / wall / 1e3,
        traffic.received as f64 / wall,
        traffic.received_bytes as f64 / wall / 1e3,
        split.received_bytes as f64 / n as f64,
        mismatch.as_secs_f64(),
    );

    if mismatch > MISMATCH_LIMIT {
        println!("the mismatch took longer than {MISMATCH_LIMIT:?}");
    }
    Ok(())
}
