//! `zero train` under `mpirun`: the losses are bit-identical to those of threads, and a killed rank
//! ends the run.
//!
//! Run with `cargo test -p zero --features mpi --test mpi`. Without `mpirun` it prints
//! SKIPPED and passes.

#[path = "mpi/agreement.rs"]
mod agreement;
#[path = "mpi/ending.rs"]
mod ending;
#[path = "common/place.rs"]
mod place;

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use integration_tests::{Files, Folder, Printed};
use serde_json::Value;

fn data(name: &str) -> String {
    place::data(name).display().to_string()
}

fn has_mpirun() -> bool {
    let found = Command::new("mpirun")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok();
    if !found {
        eprintln!("SKIPPED: no mpirun here (Debian: openmpi-bin)");
    }
    found
}

/// The arguments of a small run.
fn train(ranks: usize, more: &str) -> Vec<String> {
    let model = data("model");
    let tokens = data("tokens.u16.bin");
    let saves = match more.contains("--checkpoint ") {
        true => "",
        false => "--no-checkpoint",
    };
    let sizes = "--seq-len 32 --micro-batch 1 --clip 1";
    let line =
        format!("train {sizes} {saves} --model {model} --data {tokens} --ranks {ranks} {more}");
    line.split_whitespace().map(str::to_owned).collect()
}

/// `folder` is for the launcher's files: launchers that share one sometimes remove it while another
/// makes it.
fn mpirun(ranks: usize, folder: &Path) -> Command {
    let mut command = Command::new("mpirun");
    command.env("OMPI_MCA_orte_tmpdir_base", folder);
    command.args(["--allow-run-as-root", "--oversubscribe", "-n"]);
    command
        .arg(ranks.to_string())
        .arg(place::zero().get_program());
    command
}

fn losses(file: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(file).unwrap();
    let steps = text
        .lines()
        .map(|line| -> Value { serde_json::from_str(line).unwrap() });
    steps
        .map(|step| format!("{} {}", step["loss"], step["grad_norm"]))
        .collect()
}

fn succeeds(output: &Output) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
}

/// Also of groups, of the two levels of several machines (of which `mpirun` reports one, so a flag
/// has their ranks), and of ranks that share sequences or have parts of each parameter: their
/// communicators are splits of the world.
#[test]
fn the_losses_are_those_of_threads() {
    if !has_mpirun() {
        return;
    }
    let dir = &Folder::on_disk();
    let run = |ranks, flags: &str| agree_with_threads(dir, ranks, flags);
    for stage in ["0", "1", "2", "3"] {
        for ranks in [2, 4] {
            for dtype in ["fp32", "bf16"] {
                run(ranks, &format!("--stage {stage} --dtype {dtype}"));
            }
        }
        run(4, &format!("--stage {stage} --ranks-per-node 2"));
    }

    for flags in [
        "--stage 1 --shard-group 2",
        "--stage 2 --shard-group 2 --shard-optimizer world",
        "--stage 3 --shard-group 2",
        "--stage 3 --shard-group 2 --shard-optimizer world",
        "--stage 3 --hpz 2",
        "--stage 3 --ulysses 4 --dropout 0.1",
        "--stage 2 --ulysses 2 --dropout 0.1",
        "--stage 3 --tensor-parallel 2 --dropout 0.1 --activation-checkpointing --partition-activations",
        "--stage 2 --tensor-parallel 2 --ulysses 2 --sequence-parallel",
    ] {
        run(4, flags);
    }
}

/// `mpirun` of 4 processes, whose launcher reports machines of `[first, last]` ranks to the first two
/// and to the last two, and which have the flags `train`, the last two also `more`.
fn on_machines(dir: &Path, [first, last]: [usize; 2], train: &[String], more: &[&str]) -> Output {
    let reported = |of_node: usize| {
        [
            "env".to_owned(),
            "--unset=OMPI_COMM_WORLD_LOCAL_RANK".to_owned(),
            format!("OMPI_COMM_WORLD_LOCAL_SIZE={of_node}"),
            place::zero().get_program().to_str().unwrap().to_owned(),
        ]
    };
    let mut command = Command::new("mpirun");
    command.env("OMPI_MCA_orte_tmpdir_base", dir);
    command.args(["--allow-run-as-root", "--oversubscribe", "-n", "2"]);
    command.args(reported(first)).args(train);
    command.args([":", "-n", "2"]);
    command.args(reported(last)).args(train).args(more);
    command.output().unwrap()
}

/// Ranks choose the route by the machines of all, and a flag of some ranks only is an error.
#[test]
fn ranks_agree_on_the_route_of_collectives() {
    if !has_mpirun() {
        return;
    }
    let dir = &Folder::on_disk();
    let flags = train(4, "--stage 2 --steps 2");
    let prints = |output: &Output, route: &str| {
        succeeds(output);
        String::from_utf8_lossy(&output.stdout).shows(&[&format!("collectives: {route}")]);
    };

    let even = on_machines(dir, [2, 2], &flags, &[]);
    prints(&even, "in two levels, within 2 machines of 2 ranks");
    for machines in [[1, 2], [2, 1], [3, 2]] {
        let uneven = on_machines(dir, machines, &flags, &[]);
        prints(&uneven, "in one ring over all ranks");
    }

    let flag_of_some = on_machines(dir, [2, 2], &flags, &["--collectives", "flat"]);
    assert_eq!(flag_of_some.status.code(), Some(2));
    let error = String::from_utf8_lossy(&flag_of_some.stderr);
    error.shows(&["--collectives: ranks 0 and 2 have different flags"]);
}

/// Asserts that the processes of `mpirun` have the losses of threads.
fn agree_with_threads(dir: &Path, ranks: usize, more: &str) {
    let files = ["threads", "mpi"]
        .map(|name| dir.join(format!("{name}-{ranks}-{}", more.replace(' ', ""))));
    let flags = |path: &Path| {
        let fixed = format!("--steps 4 --grad-accum 2 --metrics {}", path.display());
        train(ranks, &format!("{fixed} {more}"))
    };
    succeeds(&place::zero().args(flags(&files[0])).output().unwrap());
    succeeds(&mpirun(ranks, dir).args(flags(&files[1])).output().unwrap());
    assert_eq!(
        losses(&files[0]),
        losses(&files[1]),
        "{ranks} ranks, {more}"
    );
}

fn verify(ckpt: &str) {
    let mut verify = place::zero();
    succeeds(&verify.args(["ckpt", "verify", ckpt]).output().unwrap());
}

/// The child processes of `run`.
fn children(run: &Child) -> String {
    let mut list = Command::new("pgrep");
    let found = list.args(["-P", &run.id().to_string()]).output().unwrap();
    String::from_utf8(found.stdout).unwrap()
}

#[test]
fn a_killed_rank_ends_the_run() {
    if !has_mpirun() {
        return;
    }
    let dir = &Folder::on_disk();
    let metrics = dir.join("metrics");
    let path = metrics.display().to_string();

    let args = train(
        3,
        &format!("--steps 1000000 --time-limit 20 --metrics {path}"),
    );

    let mut run = mpirun(3, dir)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);

    while std::fs::read_to_string(&metrics).map_or(0, |t| t.lines().count()) < 2 {
        assert!(Instant::now() < deadline, "the run did not start");
        std::thread::sleep(Duration::from_millis(50));
    }

    let ranks = children(&run);
    let victim = ranks.lines().last().expect("mpirun has children");

    let killed = Command::new("kill").args(["-9", victim]).status();
    assert!(killed.unwrap().success());

    let deadline = Instant::now() + Duration::from_secs(30);
    let status = loop {
        if let Some(status) = run.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "the run goes on without a rank");
        std::thread::sleep(Duration::from_millis(50));
    };

    assert!(!status.success());
    let alive = |rank: &&str| Path::new(&format!("/proc/{rank}/exe")).read_link().is_ok();
    while let Some(rank) = ranks.lines().find(alive) {
        assert!(Instant::now() < deadline, "process {rank} is left");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// `mpirun` of `ranks` processes, of which the last runs in the working folder `last`, as if on
/// another machine. `prefix` is put before its command.
fn two_machines(
    ranks: usize,
    (first, last): (&Path, &Path),
    prefix: &[&str],
    args: &[String],
) -> Command {
    let mut command = mpirun(ranks - 1, first);
    command.args(args).current_dir(first).arg(":").args([
        "-n",
        "1",
        "--wdir",
        &last.display().to_string(),
    ]);
    command
        .args(prefix)
        .arg(place::zero().get_program())
        .args(args);
    command
}

/// A checkpoint folder that ranks do not share, or that one cannot open, fails before the first
/// step.
#[test]
fn unshared_checkpoint_folder_is_refused_at_the_start() {
    if !has_mpirun() {
        return;
    }
    for ranks in [2, 3] {
        let dir = &Folder::on_disk();
        let a = dir.join("a");
        let b = dir.join("b");
        for folder in [&a, &b] {
            std::fs::create_dir(folder).unwrap();
        }
        let metrics = dir.join("metrics");
        let last = ranks - 1;
        let path = metrics.display().to_string();
        let args = train(
            ranks,
            &format!("--steps 2 --checkpoint ckpt --metrics {path}"),
        );
        let refused = |code: i32| {
            let output = two_machines(ranks, (&a, &b), &[], &args).output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(
                std::fs::read_to_string(&metrics).unwrap_or_default(),
                "",
                "a step ran"
            );
            text.omits(&["panicked", "rank 0: rank"]);
            assert_eq!(output.status.code(), Some(code), "{text}");
            text
        };
        let text = refused(2);
        let named = format!(
            "rank {last}: its checkpoint folder {}",
            b.join("ckpt").display()
        );
        text.shows(&[&named, "of rank 0; all ranks must save into one directory"]);

        std::fs::remove_dir_all(b.join("ckpt")).unwrap();
        b.write("ckpt", "a file");
        refused(1).shows(&[&format!("rank {last}: cannot create ckpt")]);
    }
}

/// The last rank may write no file of more than 4,096 bytes: its save can never be whole, so
/// nothing of it stays, and the run resumes from the checkpoint before.
#[test]
fn failed_staging_leaves_whole_checkpoints() {
    if !has_mpirun() {
        return;
    }
    use rustix::process::{Pid, Resource, Rlimit, prlimit};

    for ranks in [2, 3] {
        let dir = &Folder::on_disk();
        let path = |name: &str| dir.join(name).display().to_string();
        let ckpt = path("ckpt");
        let metrics = path("metrics");
        let saves = format!("--checkpoint {ckpt} --checkpoint-every 2");
        let args = train(
            ranks,
            &format!("{saves} --steps 1000000 --metrics {metrics}"),
        );
        let mut command = two_machines(ranks, (dir, dir), &["env", "--ignore-signal=XFSZ"], &args);
        let run = command
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !dir.join("ckpt/latest").exists() {
            assert!(Instant::now() < deadline, "the run did not save");
            std::thread::sleep(Duration::from_millis(20));
        }
        let of_rank = |process: &&str| {
            let variables = std::fs::read(format!("/proc/{process}/environ")).unwrap_or_default();
            let last = format!("OMPI_COMM_WORLD_RANK={}", ranks - 1);
            variables
                .split(|byte| *byte == 0)
                .any(|variable| variable == last.as_bytes())
        };
        let processes = children(&run);
        let last: i32 = processes
            .lines()
            .find(of_rank)
            .expect("the last rank runs")
            .parse()
            .unwrap();
        let limit = Rlimit {
            current: Some(4096),
            maximum: None,
        };
        prlimit(Pid::from_raw(last), Resource::Fsize, limit).unwrap();

        let output = run.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        let cause = format!("rank {}: cannot write", ranks - 1);
        text.shows(&[&cause, "File too large"]);
        let left = std::fs::read_dir(dir.join("ckpt/.staging"))
            .unwrap()
            .count();
        assert_eq!(left, 0, "{text}");
        verify(&ckpt);
        let saved = dir.text("ckpt/latest");
        let step: u64 = saved
            .split(' ')
            .next()
            .unwrap()
            .trim_start_matches("step-")
            .parse()
            .unwrap();
        let resume = format!("train --resume {ckpt} --steps {} --no-checkpoint", step + 1);
        let resume = resume.split(' ');
        succeeds(&mpirun(ranks, dir).args(resume).output().unwrap());
    }
}

/// The time limit of the communicator of [`slow_save_rank`].
const SLOW_LIMIT: Duration = Duration::from_secs(4);

/// A rank of [`slow_save_outlasts_the_time_limit`], which names its folder in the environment: the
/// last rank stages its file for longer than the communicator's limit, in steps that it reports.
#[test]
fn slow_save_rank() {
    let Ok(dir) = std::env::var("ZERO_SLOW_SAVE") else {
        return;
    };
    use zero_alloc::Pool;
    use zero_alloc::device::Device as _;
    use zero_alloc::host::HostDevice;
    use zero_ckpt::{SaveMeta, StateDtype, StateSpec, Store, StoreOptions};
    use zero_comm::{CommOptions, Communicator as _, mpi::MpiWorld};
    use zero_shard::{Layout, ParamSpec, UnitSpec};
    use zero_trainer::RankExchange;

    let world = MpiWorld::init(CommOptions::default().limit(SLOW_LIMIT)).unwrap();
    let comm = world.comm();
    let device = HostDevice::new();
    let stream = device.create_stream("save").unwrap();
    let pool = Pool::new(device, usize::MAX);
    let exchange = &mut RankExchange::new(&*comm, &pool, &stream, SLOW_LIMIT * 2);
    let rank = comm.rank() as u64;
    let ranks = comm.world_size() as u64;
    let units = [UnitSpec::new("head", [ParamSpec::new("w", [30])])];
    let layout = Layout::new(&units, ranks, 1).unwrap();
    let options = StoreOptions::default().stall_limit(Duration::from_secs(60));
    let store = Store::create_on_ranks(dir, rank, options, exchange, |_| Ok(())).unwrap();
    let states = vec![StateSpec::new("master", StateDtype::F32)];

    let stage = || {
        store.stage_streamed(1, &layout, states, |slice| {
            if rank + 1 == ranks {
                std::thread::sleep(SLOW_LIMIT * 2);
            }
            slice.bytes.fill(rank as u8);
            Ok(())
        })
    };

    store
        .save_with(&SaveMeta::default().step(1), &layout, stage, exchange)
        .unwrap();
}

/// Ranks that are apart by more than the time limit of the communicator save all the same.
#[test]
fn slow_save_outlasts_the_time_limit() {
    if !has_mpirun() {
        return;
    }
    let dir = &Folder::on_disk();
    let mut runs = [2, 3].map(|ranks| {
        let ckpt = dir.join(ranks.to_string());
        let tmp = dir.join(format!("tmp-{ranks}"));
        std::fs::create_dir(&tmp).unwrap();
        let mut command = Command::new("mpirun");
        command
            .env("OMPI_MCA_orte_tmpdir_base", &tmp)
            .env("ZERO_SLOW_SAVE", &ckpt);
        command.args(["--allow-run-as-root", "--oversubscribe", "-n"]);
        command
            .arg(ranks.to_string())
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "slow_save_rank"]);
        (command.stdout(Stdio::null()).spawn().unwrap(), ckpt)
    });

    for (run, ckpt) in &mut runs {
        assert!(run.wait().unwrap().success());
        let ckpt = ckpt.display().to_string();
        verify(&ckpt);
    }
}

/// Every rank takes up the settings and the id of the run.
#[test]
fn a_resume_needs_no_flag() {
    if !has_mpirun() {
        return;
    }
    let dir = &Folder::on_disk();
    let path = |name: &str| dir.join(name).display().to_string();

    let run = |steps: u64, metrics: &str, checkpoint: &str| {
        let flags = format!("--grad-accum 2 --lr 0.01 --stage 2 --steps {steps}");
        let [metrics, checkpoint] = [metrics, checkpoint].map(path);
        let outputs = format!("--metrics {metrics} --checkpoint {checkpoint}");
        let args = train(2, &format!("{flags} {outputs}"));
        succeeds(&mpirun(2, dir).args(args).output().unwrap());
    };

    run(4, "whole", "a");
    run(2, "first", "b");
    let resume = ["train", "--resume", &path("b"), "--steps", "4"];
    let mut rest = mpirun(2, dir);
    rest.args(resume).args(["--metrics", &path("rest")]);
    succeeds(&rest.output().unwrap());
    let losses = |name: &str| losses(&dir.join(name));
    assert_eq!(losses("whole"), [losses("first"), losses("rest")].concat());
    let run_of = |step: u64| {
        let text = dir.bytes(&format!("b/step-{step:08}/run.json"));
        serde_json::from_slice::<Value>(&text).unwrap()["run"].to_string()
    };

    assert_eq!(run_of(2), run_of(4));
}

/// The other ranks resume from the checkpoint that rank 0 verified, and receive its error.
#[test]
fn rank_0_finds_the_checkpoint() {
    if !has_mpirun() {
        return;
    }
    let dir = &Folder::on_disk();
    let path = |name: &str| dir.join(name).display().to_string();

    let first = format!("--steps 2 --checkpoint-every 1 --checkpoint {}", path("d"));
    let first = train(2, &first);
    succeeds(&mpirun(2, dir).args(first).output().unwrap());

    let damage = |step: u64| {
        let shard = dir.join(format!("d/step-{step:08}/shard-00001-of-00002.safetensors"));
        let mut bytes = std::fs::read(&shard).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(shard, bytes).unwrap();
    };

    let resume = || {
        let mut resume = mpirun(2, dir);
        resume.args(["train", "--resume", &path("d"), "--steps", "3"]);
        resume.args(["--metrics", &path("m"), "--no-checkpoint"]);
        resume.output().unwrap()
    };

    damage(2);
    let resumed = resume();
    succeeds(&resumed);
    let text = [resumed.stdout, resumed.stderr].concat();
    String::from_utf8_lossy(&text).shows(&["step-00000002 is passed over"]);
    assert_eq!(losses(&dir.join("m")).len(), 2);
    damage(1);
    let failed = resume();
    let text = String::from_utf8_lossy(&failed.stderr);
    assert_eq!(failed.status.code(), Some(2), "{text}");
    text.shows(&["no complete checkpoint"]);
    text.omits(&["panicked"]);
}
