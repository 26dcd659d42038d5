//! The launcher ends all processes of a job together. The ranks here are shell scripts.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use zero::launcher::{Job, JobError, Report};

use crate::support::{Files, is_running, on_disk, signal, wait_until};

/// Timeout that expires only if the launcher is broken; scripts that must be killed sleep longer.
const LIMIT: Duration = Duration::from_secs(120);
/// The environment variable with the script of a launcher that runs in its own process.
const SCRIPT: &str = "ZERO_TEST_SCRIPT";

fn job(ranks: usize, script: &str, grace: Duration) -> Job {
    Job {
        ranks,
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        variables: vec![("EXTRA".to_owned(), "more".to_owned())],
        grace,
    }
}

fn run(job: &Job) -> Result<(), JobError> {
    let begun = Instant::now();
    let result = job.run(&mut || None);
    assert!(begun.elapsed() < LIMIT, "{job:?}");
    result
}

/// The entry point of a launcher in its own process. Without the variable it passes immediately.
#[test]
fn launcher_process() {
    if let Ok(script) = std::env::var(SCRIPT) {
        let mut received = signal_hook::iterator::Signals::new([
            signal_hook::consts::SIGINT,
            signal_hook::consts::SIGTERM,
        ])
        .unwrap();
        let ended =
            job(3, &script, Duration::from_millis(300)).run(&mut || received.pending().next());
        println!("ended: {ended:?}");
    }
}

fn launcher(script: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--nocapture", "launcher::launcher_process"]);
    command.env(SCRIPT, script);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

fn output(mut child: Child) -> (Output, String) {
    wait_until("the launcher does not end", || {
        child.try_wait().unwrap().is_some()
    });
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, text)
}

/// Waits until `n` ranks have written their process ids into `folder`, and reads them.
fn pids(folder: &Path, n: usize) -> Vec<u32> {
    let read = |entry: std::io::Result<fs::DirEntry>| {
        let text = fs::read_to_string(entry.ok()?.path());
        text.ok()?.trim().parse().ok()
    };
    let mut pids = Vec::new();
    wait_until("ranks do not start", || {
        pids = fs::read_dir(folder).unwrap().filter_map(read).collect();
        pids.len() == n
    });
    pids
}

fn all_end(pids: &[u32]) {
    wait_until("a process outlives its launcher", || {
        !pids.iter().any(|&pid| is_running(pid))
    });
}

/// Shell code: returns when the launcher has collected the exit status of the rank before this one.
fn after_previous_rank(folder: &Path) -> String {
    let here = folder.display();
    format!(
        "echo $$ > {here}/$RANK
         if [ $RANK -gt 0 ]; then
            previous={here}/$((RANK - 1))
            while [ ! -s $previous ]; do sleep 0.02; done
            while kill -0 $(cat $previous) 2>/dev/null; do sleep 0.02; done
         fi
         "
    )
}

#[test]
fn ranks_get_variables_and_a_prefix() {
    let script =
        "echo I am $RANK of $WORLD_SIZE on $LOCAL_RANK, $MASTER_ADDR, $EXTRA; echo oh $RANK >&2;
                  [ $RANK = 0 ] || printf end";
    let (output, out) = output(launcher(script));
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{out}{err}");
    let lines: Vec<&str> = out.lines().collect();
    assert!(
        lines.contains(&"I am 0 of 3 on 0, 127.0.0.1, more"),
        "{out}"
    );

    for rank in [1, 2] {
        let line = format!("[rank {rank}] I am {rank} of 3 on {rank}, 127.0.0.1, more");
        assert!(lines.contains(&line.as_str()), "{out}");
        assert!(
            lines.contains(&format!("[rank {rank}] end").as_str()),
            "{out}"
        );
        assert!(
            err.lines().any(|l| l == format!("[rank {rank}] oh {rank}")),
            "{err}"
        );
    }

    assert!(err.lines().any(|l| l == "oh 0"), "{err}");
}

/// Each job has its own token, in the environment of its ranks only.
#[test]
fn ranks_share_a_secret_token() {
    let folder = &on_disk();
    let script = format!("printf %s $ZERO_TOKEN > {}/$1-$RANK", folder.display());
    let read = |job: &str, rank: &str| folder.text(&format!("{job}-{rank}"));
    let mut tokens = Vec::new();

    for number in ["a", "b"] {
        let mut job = job(2, &script, Duration::ZERO);
        job.args.extend(["sh".into(), number.into()]);
        assert_eq!(run(&job), Ok(()));
        assert_eq!(read(number, "0"), read(number, "1"));
        tokens.push(read(number, "0"));
        assert!(!format!("{job:?}").contains(&tokens[0]), "{job:?}");
    }

    assert!(
        tokens[0].len() == 32 && tokens[0] != tokens[1],
        "{tokens:?}"
    );
}

#[test]
fn job_succeeds_when_all_ranks_do() {
    assert_eq!(run(&job(4, "exit 0", Duration::ZERO)), Ok(()));
}

#[test]
fn one_failure_kills_all_descendants() {
    let folder = &on_disk();
    let here = folder.display();
    // Ranks 0 and 2 each start a child and wait for it; rank 1 fails when both have started.
    let script = format!(
        "if [ $RANK = 1 ]; then while [ ! -s {here}/0 ] || [ ! -s {here}/2 ]; do sleep 0.02; done; exit 3; fi
         sleep 600 & echo $! > {here}/$RANK; wait"
    );
    let grace = Duration::from_millis(300);
    assert_eq!(
        run(&job(3, &script, grace)),
        Err(JobError::Exit { rank: 1, code: 3 })
    );
    all_end(&pids(folder, 2));
    let killed = job(2, "if [ $RANK = 1 ]; then kill -9 $$; fi; sleep 600", grace);
    assert_eq!(run(&killed), Err(JobError::Killed { rank: 1, signal: 9 }));
    let missing = Job {
        program: "/no/such/program".into(),
        ..job(2, "", grace)
    };

    assert!(matches!(
        missing.run(&mut || None),
        Err(JobError::Start { rank: 0, .. })
    ));
}

#[test]
fn root_cause_wins_over_earlier_echoes() {
    let write_report = r#"
        echo "{\"code\":$code,\"echo\":$echo,\"message\":\"rank $RANK\"}" > $ZERO_REPORT_FILE
        exit $code"#;
    // In this order: rank 0 fails because of rank 1, rank 1 is the cause, rank 2 fails by itself.
    let roles = "case $RANK in 0) echo=true; code=1 ;; 1) echo=false; code=2 ;; *) echo=false; code=1 ;; esac";
    let folder = &on_disk();
    let script = after_previous_rank(folder) + roles + write_report;
    let report = Report {
        code: 2,
        echo: false,
        message: "rank 1".to_owned(),
    };

    assert_eq!(
        run(&job(3, &script, LIMIT)),
        Err(JobError::Reported { rank: 1, report })
    );
    // If every report is an echo, the first one is returned.
    let folder = &on_disk();
    let script = after_previous_rank(folder) + "echo=true; code=1" + write_report;
    assert!(matches!(
        run(&job(3, &script, LIMIT)),
        Err(JobError::Reported { rank: 0, .. })
    ));
}

#[test]
fn interrupt_reaches_every_rank_once() {
    let folder = &on_disk();
    let here = folder.display();
    let script = format!(
        "n=0; trap 'n=$((n+1))' INT; echo $$ > {here}/$RANK; i=0;
         while [ $n = 0 ]; do sleep 0.02; done; sleep 0.2; echo interrupted $n"
    );
    let launcher = launcher(&script);
    pids(folder, 3);
    signal(&launcher, "-INT");
    let (output, out) = output(launcher);
    assert!(output.status.success(), "{out}");
    assert_eq!(out.matches("interrupted 1").count(), 3, "{out}");
    assert!(
        out.contains("ended: Ok(())"),
        "the ranks ended by themselves: {out}"
    );
}

/// Ranks that end with 128 + the signal, and ranks without a handler; the last one's peers would
/// wait for ever.
#[test]
fn signal_that_ends_the_ranks_is_the_result() {
    let folder = &on_disk();
    let here = folder.display();
    let handled = "trap 'exit 143' TERM; trap 'exit 130' INT";
    let unhandled = "[ $RANK = 2 ] || trap '' TERM INT";
    for (name, number) in [("-INT", 2), ("-TERM", 15)] {
        for trap in [handled, unhandled] {
            let launcher = launcher(&format!(
                "{trap}; echo $$ > {here}/$RANK; while :; do sleep 0.02; done"
            ));
            let pids = pids(folder, 3);
            signal(&launcher, name);
            let (_, out) = output(launcher);
            assert!(
                out.contains(&format!("ended: Err(Interrupted {{ signal: {number} }})")),
                "{trap}: {out}"
            );
            all_end(&pids);
            (0..3).for_each(|rank| fs::remove_file(folder.join(rank.to_string())).unwrap());
        }
    }
}

#[test]
fn second_interrupt_kills_ranks() {
    let folder = &on_disk();
    let script = format!(
        "trap '' INT; echo $$ > {}/$RANK; exec sleep 600",
        folder.display()
    );
    let mut launcher = launcher(&script);
    let pids = pids(folder, 3);
    signal(&launcher, "-INT");
    std::thread::sleep(Duration::from_millis(100));
    assert!(pids.iter().all(|&pid| is_running(pid)));
    // Two signals that arrive together count once, so that one more may be needed.
    wait_until("the launcher does not end", || {
        signal(&launcher, "-INT");
        std::thread::sleep(Duration::from_millis(100));
        launcher.try_wait().unwrap().is_some()
    });
    all_end(&pids);
}

#[test]
fn killed_launcher_leaves_no_process() {
    let folder = &on_disk();
    let launcher = launcher(&format!(
        "echo $$ > {}/$RANK; exec sleep 600",
        folder.display()
    ));
    let pids = pids(folder, 3);
    signal(&launcher, "-9");
    all_end(&pids);
    output(launcher);
}
