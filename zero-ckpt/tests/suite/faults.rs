//! Faults at a save of three processes: a killed or stopped rank, a full disk, a folder that is
//! read-only or vanishes.
//!
//! Afterwards, whatever the fault and the load of the machine: no process hangs, the last whole
//! checkpoint loads, a rank that failed has its staged file and names it, and rank 0 has deleted
//! nothing unless the save succeeded.
//!
//! The ranks are this test binary. They exchange over Unix sockets, whose read timeout is the
//! communicator's limit. At the point of the fault a rank creates the file `reached` and waits for
//! the file `go`.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use zero_ckpt::testing::SavePoint;
use zero_ckpt::{
    BackgroundStore, CkptError, Exchange, MESSAGE_BYTES, PublishedCheckpoint, RECORD_BYTES, Reader,
    Store, StoreOptions, assemble,
};
use zero_shard::Layout;

use crate::common::{
    LONG, NONE, STATES, assert_holds, kept, layout, meta, saved, specs, staged, storage,
    wait_until, with_shard,
};

const RANKS: u64 = 3;
/// Precedes the result in the output of a rank.
const OUTCOME: &str = "outcome of the rank: ";

/// The moment of a fault.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    /// In the copy of [`BackgroundStore::begin`].
    Copy,
    /// In its fence.
    Fence,
    Point(SavePoint),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Kill,
    /// Stops the rank for three limits of the communicator.
    Stop,
    /// No file of the rank can grow.
    FullDisk,
    ReadOnly,
    /// `.staging` is removed.
    StagingVanishes,
    /// The folder is renamed, until the ranks have ended.
    FolderVanishes,
}

fn name(at: At) -> String {
    format!("{at:?}")
}

fn options(limit: Duration) -> StoreOptions {
    StoreOptions::default()
        .run("a")
        .keep_last(1)
        .stall_limit(limit)
}

/// Ranks that are connected to rank 0.
struct Sockets {
    rank: u64,
    /// On rank 0 the other ranks, in rank order; on others rank 0.
    peers: Vec<UnixStream>,
}

impl Sockets {
    fn connect(folder: &Path, rank: u64, limit: Duration) -> Self {
        let path = folder.join("socket");
        let peers = if rank == 0 {
            let listener = UnixListener::bind(folder.join("binding")).unwrap();
            fs::rename(folder.join("binding"), path).unwrap();
            let accept = |_| {
                let mut peer = listener.accept().unwrap().0;
                let mut rank = [0];
                peer.read_exact(&mut rank).unwrap();
                (rank[0], peer)
            };
            let mut peers: Vec<_> = (1..RANKS).map(accept).collect();
            peers.sort_by_key(|(rank, _)| *rank);
            peers.into_iter().map(|(_, peer)| peer).collect()
        } else {
            wait_until("rank 0 does not listen", || path.exists());
            let mut peer = UnixStream::connect(path).unwrap();
            peer.write_all(&[rank as u8]).unwrap();
            vec![peer]
        };

        let mut sockets = Self { rank, peers };
        // The limit holds once all are connected.
        sockets.broadcast(&mut [0; MESSAGE_BYTES], 0).unwrap();
        sockets
            .peers
            .iter()
            .for_each(|peer| peer.set_read_timeout(Some(limit)).unwrap());

        sockets
    }
}

impl Exchange for Sockets {
    type Error = std::io::Error;

    fn gather(&mut self, record: &[u8]) -> Result<Vec<u8>, std::io::Error> {
        let mut all = record.to_vec();
        if self.rank > 0 {
            self.peers[0].write_all(record)?;
            return Ok(all);
        }
        for peer in &mut self.peers {
            let mut record = [0; RECORD_BYTES];
            peer.read_exact(&mut record)?;
            all.extend(record);
        }
        Ok(all)
    }

    fn broadcast(&mut self, message: &mut [u8], root: u64) -> Result<(), std::io::Error> {
        if self.rank == root && root > 0 {
            self.peers[0].write_all(message)?;
        }
        if self.rank > 0 {
            return self.peers[0].read_exact(message);
        }
        if root > 0 {
            self.peers[root as usize - 1].read_exact(message)?;
        }
        self.peers
            .iter_mut()
            .try_for_each(|peer| peer.write_all(message))
    }
}

/// A rank; its arguments are in the environment.
#[test]
fn rank_process() {
    let Ok(arguments) = std::env::var("ZERO_CKPT_RANK") else {
        return;
    };
    let args: Vec<&str> = arguments.split(' ').collect();
    let (folder, rank): (PathBuf, u64) = (args[0].into(), args[1].parse().unwrap());
    let limit = Duration::from_millis(args[2].parse().unwrap());
    // Several messages fit the limit of the sockets.
    let stall_limit = limit * 2;
    let stops_at = args.get(3).map(|at| (*at).to_owned());
    let stop_in = folder.clone();
    let stop = move |at: At| {
        if stops_at.as_ref() == Some(&name(at)) && !stop_in.join("reached").exists() {
            fs::write(stop_in.join("reached"), "").unwrap();
            wait_until("the fault", || stop_in.join("go").exists());
        }
    };

    let stop: Arc<dyn Fn(At) + Send + Sync> = Arc::new(stop);
    let mut sockets = Sockets::connect(&folder, rank, limit);
    let observe = Arc::clone(&stop);
    let dir = folder.join("ckpt");
    let result = Store::create_on_ranks(
        &dir,
        rank,
        options(stall_limit),
        &mut sockets,
        Store::check_runs,
    )
    .and_then(|store| {
        let store = store.observe(move |at| observe(At::Point(at)));
        save(store, &layout(RANKS, 4), 20, &mut sockets, &stop)
    });

    let text = result.map_or_else(
        |error| format!("error: {error}"),
        |published| published.name,
    );
    // Not into a file, which would need space on the disk.
    println!("{OUTCOME}{text}");
}

/// Saves `step` in the background.
fn save(
    store: Store,
    layout: &Layout,
    step: u64,
    exchange: &mut impl Exchange,
    stop: &Arc<dyn Fn(At) + Send + Sync>,
) -> Result<PublishedCheckpoint, CkptError> {
    let rank = store.rank();
    if rank == 2 {
        // One of the ranks saves without a background store; the ranks' messages are the same.
        return with_shard(layout, rank, step, |shard| {
            store.save(&meta(step), shard, exchange)
        });
    }
    let states = STATES.map(|state| storage(layout, rank, state, step));

    let mut store = BackgroundStore::new(store, Arc::new(layout.clone()), specs(), 1)?;
    let fence = Arc::clone(stop);

    store.begin(meta(step), |slices| {
        stop(At::Copy);
        for slice in slices {
            let unit = &layout.units()[slice.unit];
            let state = STATES
                .iter()
                .position(|state| *state == slice.state.name)
                .unwrap();
            let start = unit.shard_range().start as usize;
            let elems = start + slice.in_shard.start as usize..start + slice.in_shard.end as usize;
            for (to, from) in slice.bytes.chunks_exact_mut(4).zip(&states[state][elems]) {
                to.copy_from_slice(&from.to_le_bytes());
            }
        }
        Ok(Box::new(move || {
            fence(At::Fence);
            Ok(())
        }))
    })?;

    store.complete(exchange)
}

/// A run of three processes with a fault.
struct Scenario {
    fault: Fault,
    at: At,
    rank: u64,
    folder: tempfile::TempDir,
    ranks: Vec<Child>,
}

impl Scenario {
    /// Saves step 10, then starts the ranks, and waits until `rank` has reached `at`. `None` if it
    /// ended before that: on a busy machine a wait exceeded the limit of the communicator.
    fn start((fault, at, rank): (Fault, At, u64), limit: Duration) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("ckpt");
        saved(&dir, &layout(RANKS, 4), 10, 10, &options(LONG));
        let ranks = (0..RANKS).map(|this| {
            let point = if this == rank {
                name(at)
            } else {
                String::new()
            };
            // Root without this capability obeys permissions; a process that ignores the signal
            // gets an error instead.
            let wrapper = [
                "--ignore-signal=XFSZ",
                "setpriv",
                "--bounding-set",
                "-dac_override",
            ];
            let mut command = Command::new("env");
            command.args(wrapper).arg(std::env::current_exe().unwrap());
            command.args(["--exact", "faults::rank_process", "--nocapture"]);
            command.env(
                "ZERO_CKPT_RANK",
                format!(
                    "{} {this} {} {point}",
                    folder.path().display(),
                    limit.as_millis()
                ),
            );
            command
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        });

        let ranks = ranks.collect();
        let mut scenario = Self {
            fault,
            at,
            rank,
            folder,
            ranks,
        };

        let reached = scenario.path("reached");
        wait_until("the point of the fault", || {
            reached.exists() || scenario.have_ended()
        });
        reached.exists().then_some(scenario)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn have_ended(&mut self) -> bool {
        self.ranks
            .iter_mut()
            .all(|rank| rank.try_wait().unwrap().is_some())
    }

    fn signal(&self, signal: &str) {
        let process = self.ranks[self.rank as usize].id().to_string();
        assert!(
            Command::new("kill")
                .args([signal, &process])
                .status()
                .unwrap()
                .success()
        );
    }

    /// Causes the fault, and waits until all ranks have ended.
    fn cause(&mut self, limit: Duration) {
        let dir = self.path("ckpt");
        let go = self.path("go");
        let mode = |mode: u32| {
            for folder in [&dir.join(".staging"), &dir] {
                fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
            }
        };

        match self.fault {
            Fault::Kill => self.signal("-KILL"),
            Fault::Stop => {
                self.signal("-STOP");
                std::thread::sleep(limit * 3);
                fs::write(&go, "").unwrap();
                self.signal("-CONT");
            }
            Fault::FullDisk => {
                let process = self.ranks[self.rank as usize].id().to_string();
                let limited = Command::new("prlimit")
                    .args(["--fsize=0:unlimited", "--pid", &process])
                    .status();
                assert!(limited.unwrap().success());
            }
            Fault::ReadOnly => mode(0o555),
            // Renamed, as other ranks may write into it meanwhile.
            Fault::StagingVanishes => fs::rename(dir.join(".staging"), self.path("gone")).unwrap(),
            Fault::FolderVanishes => fs::rename(&dir, self.path("moved")).unwrap(),
        }

        fs::write(&go, "").unwrap();
        wait_until("a rank hangs", || self.have_ended());
        match self.fault {
            Fault::ReadOnly => mode(0o755),
            Fault::FolderVanishes => fs::rename(self.path("moved"), &dir).unwrap(),
            _ => {}
        }
    }

    /// The checkpoint that a rank has saved, or its error; empty if it was killed.
    fn outcome(&mut self, rank: u64) -> String {
        let mut text = String::new();
        self.ranks[rank as usize]
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        text.split(OUTCOME)
            .nth(1)
            .and_then(|rest| rest.lines().next())
            .unwrap_or_default()
            .to_owned()
    }

    fn check(&mut self) {
        let outcomes: Vec<String> = (0..RANKS).map(|rank| self.outcome(rank)).collect();
        let Self {
            fault, at, rank, ..
        } = self;
        let dir = self.folder.path().join("ckpt");
        let context = format!("{fault:?} at {at:?} of rank {rank}");
        let context = format!("{context}: {outcomes:?}");

        // Whole, and the step that its name says.
        let found = zero_ckpt::resolve(&dir)
            .map_err(|error| error.to_string())
            .expect(&context);
        assert!(
            found.passed_over.is_empty(),
            "{context}: {:?}",
            found.passed_over
        );
        let step = found.reader.manifest().step;
        assert_holds(&found.reader, &layout(RANKS, 4), step);
        drop(found);

        for (index, outcome) in outcomes.iter().enumerate() {
            let is_killed = *fault == Fault::Kill && index as u64 == *rank;
            assert_eq!(
                outcome.is_empty(),
                is_killed,
                "{context}: a rank has no outcome"
            );
            assert!(
                outcome != "step-00000020" || step == 20,
                "{context}: a save that succeeded is lost"
            );
            let kept = kept(outcome);
            // A later rename of rank 0 may have moved or published it.
            if let Some(kept) = kept.filter(|_| step == 10 && *fault != Fault::StagingVanishes) {
                assert!(
                    kept.exists() || staged(&dir).iter().any(|name| name.contains(".ready.")),
                    "{context}"
                );
            }
        }

        if outcomes[0] != "step-00000020" && *at != At::Point(SavePoint::Pruning) {
            assert!(
                dir.join("step-00000010").exists(),
                "{context}: rank 0 failed and deleted a checkpoint"
            );
        }

        // Nothing was lost after all files were staged: what is not published can be assembled.
        let all_staged = [
            SavePoint::DirCreated,
            SavePoint::FilesMoved,
            SavePoint::ManifestSynced,
        ]
        .map(At::Point);

        if step == 10 && all_staged.contains(at) && *fault != Fault::StagingVanishes {
            let assembled = assemble(&dir, &NONE)
                .map_err(|error| error.to_string())
                .expect(&context);
            assert_eq!(assembled.checkpoint.step, 20, "{context}");
            assert_holds(&Reader::open(&dir).unwrap(), &layout(RANKS, 4), 20);
        }
    }
}

impl Drop for Scenario {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// Runs the scenarios; skips them if the tools are missing.
fn run(faults: &[(Fault, At, u64)], limit: Duration) {
    for tool in ["setpriv", "prlimit"] {
        if !Command::new(tool)
            .arg("--version")
            .output()
            .is_ok_and(|output| output.status.success())
        {
            eprintln!("SKIPPED: {tool} of util-linux is missing here");
            return;
        }
    }
    for fault in faults {
        // An attempt ends early if the machine is busier than the communicator's limit allows.
        let started = (0..20).find_map(|_| Scenario::start(*fault, limit));
        let mut scenario = started.unwrap_or_else(|| panic!("{fault:?}: the point is not reached"));
        scenario.cause(limit);
        scenario.check();
    }
}

#[test]
fn killed_rank_loses_nothing() {
    let at = |point, rank| (Fault::Kill, At::Point(point), rank);
    let faults = [
        at(SavePoint::FileCreated, 0),
        at(SavePoint::StateWritten, 2),
        at(SavePoint::FileSynced, 1),
        at(SavePoint::DirCreated, 0),
        at(SavePoint::FilesMoved, 0),
        at(SavePoint::ManifestSynced, 0),
        at(SavePoint::Renamed, 0),
        at(SavePoint::Pruning, 0),
    ];
    run(&faults, Duration::from_secs(10));
}

#[test]
fn stopped_rank_ends_and_deletes_nothing() {
    let at = |at, rank| (Fault::Stop, at, rank);
    let faults = [
        at(At::Copy, 1),
        at(At::Fence, 1),
        at(At::Point(SavePoint::StateWritten), 2),
        at(At::Point(SavePoint::FileSynced), 0),
        at(At::Point(SavePoint::FilesMoved), 0),
        at(At::Point(SavePoint::LatestMoved), 0),
        at(At::Point(SavePoint::Pruning), 0),
    ];
    run(&faults, Duration::from_millis(300));
}

#[test]
fn disk_faults_lose_nothing() {
    let at = |fault, point, rank| (fault, At::Point(point), rank);
    let faults = [
        at(Fault::FullDisk, SavePoint::FileCreated, 1),
        at(Fault::FullDisk, SavePoint::FileSynced, 0),
        at(Fault::FullDisk, SavePoint::FilesMoved, 0),
        at(Fault::ReadOnly, SavePoint::FileSynced, 2),
        at(Fault::ReadOnly, SavePoint::DirCreated, 0),
        at(Fault::ReadOnly, SavePoint::ManifestSynced, 0),
        at(Fault::ReadOnly, SavePoint::Pruning, 0),
        at(Fault::StagingVanishes, SavePoint::FileSynced, 1),
        at(Fault::StagingVanishes, SavePoint::DirCreated, 0),
        at(Fault::FolderVanishes, SavePoint::FileCreated, 0),
        at(Fault::FolderVanishes, SavePoint::ManifestSynced, 0),
    ];
    run(&faults, Duration::from_secs(10));
}
