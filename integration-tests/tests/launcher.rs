//! Processes that a launcher starts end as a whole: dummy ranks, which are shells.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use integration_tests::launcher::{Job, JobError, Report};

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);
/// The variable with what a launcher in a process of its own runs.
const SCRIPT: &str = "ZERO_TEST_SCRIPT";

fn job(ranks: usize, script: &str) -> Job {
    Job {
        ranks,
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        variables: vec![("EXTRA".to_owned(), "more".to_owned())],
        grace: Duration::from_millis(300),
    }
}

fn run(ranks: usize, script: &str) -> Result<(), JobError> {
    let begun = Instant::now();
    let result = job(ranks, script).run(&AtomicUsize::new(0));
    assert!(begun.elapsed() < LONG / 2, "{script}");
    result
}

/// The entry point of a launcher that runs in a process of its own; nothing otherwise.
#[test]
fn launcher_process() {
    static INTERRUPTS: AtomicUsize = AtomicUsize::new(0);
    if let Ok(script) = std::env::var(SCRIPT) {
        ctrlc::set_handler(|| {
            INTERRUPTS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        })
        .unwrap();
        job(3, &script).run(&INTERRUPTS).unwrap();
    }
}

fn launcher(script: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--nocapture", "launcher_process"]).env(SCRIPT, script);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn output(mut child: Child) -> (Output, String) {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > LONG {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, text)
}

/// Waits until `n` ranks have written their process ids into `folder`, and reads them.
fn pids(folder: &Path, n: usize) -> Vec<u32> {
    let begun = Instant::now();
    loop {
        let read =
            |entry: std::io::Result<fs::DirEntry>| fs::read_to_string(entry.ok()?.path()).ok()?.trim().parse().ok();
        let pids: Vec<u32> = fs::read_dir(folder).unwrap().filter_map(read).collect();
        if pids.len() == n {
            return pids;
        }
        assert!(begun.elapsed() < LONG, "{pids:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_running(pid: u32) -> bool {
    // A zombie is not: it only waits to be counted.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn all_end(pids: &[u32]) {
    let begun = Instant::now();
    while let Some(pid) = pids.iter().find(|&&pid| is_running(pid)) {
        assert!(begun.elapsed() < LONG, "process {pid} is left over");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn ranks_know_who_they_are_and_their_lines_say_it() {
    let script = "echo I am $RANK of $WORLD_SIZE on $LOCAL_RANK, $MASTER_ADDR, $EXTRA; echo oh $RANK >&2;
                  [ $RANK = 0 ] || printf end";
    let (output, out) = output(launcher(script));
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{out}{err}");
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines.contains(&"I am 0 of 3 on 0, 127.0.0.1, more"), "{out}");
    for rank in [1, 2] {
        let line = format!("[rank {rank}] I am {rank} of 3 on {rank}, 127.0.0.1, more");
        assert!(lines.contains(&line.as_str()), "{out}");
        assert!(lines.contains(&format!("[rank {rank}] end").as_str()), "{out}");
        assert!(err.lines().any(|l| l == format!("[rank {rank}] oh {rank}")), "{err}");
    }
    assert!(err.lines().any(|l| l == "oh 0"), "{err}");
}

#[test]
fn all_ranks_that_end_well_are_a_success() {
    assert_eq!(run(4, "exit 0"), Ok(()));
}

#[test]
fn one_failure_ends_all_and_what_they_started() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().display();
    // The others start a process that they wait for, and do not notice.
    let script = format!("if [ $RANK = 1 ]; then sleep 0.2; exit 3; fi; sleep 600 & echo $! > {here}/$RANK; wait");
    assert_eq!(run(3, &script), Err(JobError::Exit { rank: 1, code: 3 }));
    all_end(&pids(folder.path(), 2));
    assert_eq!(
        run(2, "if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 600"),
        Err(JobError::Killed { rank: 1, signal: 9 })
    );
    let missing = Job { program: "/no/such/program".into(), ..job(2, "") };
    assert!(matches!(missing.run(&AtomicUsize::new(0)), Err(JobError::Start { rank: 0, .. })));
}

#[test]
fn the_cause_is_told_and_not_what_others_saw_of_it() {
    // Rank 0 says first what it saw; rank 1 is the cause; rank 2 is another one, later.
    let script = r#"
        case $RANK in
        0) echo=true; code=1 ;;
        1) echo=false; code=2; sleep 0.1 ;;
        *) echo=false; code=1; sleep 0.2 ;;
        esac
        echo "{\"code\":$code,\"echo\":$echo,\"message\":\"rank $RANK\"}" > $ZERO_REPORT_FILE
        exit $code"#;
    let report = Report { code: 2, echo: false, message: "rank 1".to_owned() };
    assert_eq!(run(3, script), Err(JobError::Reported { rank: 1, report }));
    // Where all only saw something, the first is told.
    let echoes =
        r#"sleep 0.$RANK; echo "{\"code\":1,\"echo\":true,\"message\":\"$RANK\"}" > $ZERO_REPORT_FILE; exit 1"#;
    assert!(matches!(run(3, echoes), Err(JobError::Reported { rank: 0, .. })));
}

#[test]
fn an_interrupt_reaches_every_rank_once() {
    let folder = tempfile::tempdir().unwrap();
    let here = folder.path().display();
    let script = format!(
        "n=0; trap 'n=$((n+1))' INT; echo $$ > {here}/$RANK; i=0;
         while [ $n = 0 ]; do sleep 0.02; done; sleep 0.2; echo interrupted $n"
    );
    let launcher = launcher(&script);
    pids(folder.path(), 3);
    signal(&launcher, "-INT");
    let (output, out) = output(launcher);
    assert!(output.status.success(), "{out}");
    assert_eq!(out.matches("interrupted 1").count(), 3, "{out}");
}

#[test]
fn two_interrupts_end_ranks_that_do_not_listen() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("trap '' INT; echo $$ > {}/$RANK; exec sleep 600", folder.path().display());
    let launcher = launcher(&script);
    let pids = pids(folder.path(), 3);
    signal(&launcher, "-INT");
    std::thread::sleep(Duration::from_millis(100));
    assert!(pids.iter().all(|&pid| is_running(pid)));
    signal(&launcher, "-INT");
    output(launcher);
    all_end(&pids);
}

#[test]
fn a_launcher_that_is_killed_leaves_nobody_behind() {
    let folder = tempfile::tempdir().unwrap();
    let launcher = launcher(&format!("echo $$ > {}/$RANK; exec sleep 600", folder.path().display()));
    let pids = pids(folder.path(), 3);
    signal(&launcher, "-9");
    all_end(&pids);
    output(launcher);
}
