//! Ranks as processes over NCCL: this program starts itself once per rank and checks the output.
//!
//! On a machine with fewer GPUs than ranks, ranks share a GPU, which NCCL allows since 2.30.
//! Without NCCL the tests print that they are skipped, or fail if `ZERO_REQUIRE_NCCL` is set, as by
//! integration-tests/stand-ins/with-stand-ins.

#[path = "nccl/rank.rs"]
mod rank;

use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use zero_comm::{CommError, nccl};

/// Time limit of a process.
const PROCESS_LIMIT: Duration = Duration::from_secs(240);

/// Prints that a test is skipped; returns false.
fn skipped(test: &str, why: &str) -> bool {
    // Not `eprintln!`, which the test harness captures.
    let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {why}\n").as_bytes());
    false
}

/// Returns whether NCCL is available; prints that `test` is skipped if not.
fn library(test: &str) -> bool {
    match nccl::version() {
        Ok(version) => println!("NCCL {version}"),
        Err(error @ CommError::NoLibrary { .. })
            if std::env::var_os("ZERO_REQUIRE_NCCL").is_none() =>
        {
            return skipped(test, &error.to_string());
        }
        Err(error) => panic!("{error}"),
    }
    true
}

/// Returns whether NCCL is the stand-in; prints that `test` is skipped if not.
fn stand_in(test: &str) -> bool {
    library(test) && (rank::is_stand_in() || skipped(test, "only the stand-in simulates this"))
}

fn finish(mut child: Child, deadline: Instant) -> Output {
    while child.try_wait().unwrap().is_none() {
        if Instant::now() >= deadline {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Runs `case` as `n` processes; returns their outputs and the time.
fn launch(n: usize, case: &str, more: &[(&str, &str)]) -> (Vec<Output>, Duration) {
    let begun = Instant::now();
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();

    let spawn = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--ignored",
            "--exact",
            "--nocapture",
            "cuda_rank_of_a_world",
        ]);
        command
            .env(rank::CASE, case)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", n.to_string());
        command
            .env("LOCAL_RANK", rank.to_string())
            .env("MASTER_ADDR", "127.0.0.1");
        command
            .env("MASTER_PORT", port.to_string())
            .env("RUST_BACKTRACE", "0");
        command
            .env("NCCL_MULTI_RANK_GPU_ENABLE", "1")
            .env("NCCL_MAX_CTAS", "8")
            .env("NCCL_GRAPH_REGISTER", "0");
        command
            .envs(more.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };

    let children: Vec<Child> = (0..n).map(spawn).collect();
    let outputs = children
        .into_iter()
        .map(|child| finish(child, begun + PROCESS_LIMIT))
        .collect();
    (outputs, begun.elapsed())
}

fn expect(ok: bool, case: &str, outputs: &[Output]) {
    let text: Vec<String> = outputs
        .iter()
        .enumerate()
        .map(|(rank, o)| {
            let out = String::from_utf8_lossy(&o.stdout);
            let err = String::from_utf8_lossy(&o.stderr);
            format!("--- rank {rank}: {}\n{out}{err}", o.status)
        })
        .collect();
    assert!(ok, "{case}\n{}", text.join("\n"));
}

fn prints(output: &Output, text: &str) -> bool {
    String::from_utf8_lossy(&output.stdout).contains(text)
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_rank_of_a_world() {
    // The entry point of processes that `launch` starts; otherwise it does nothing.
    if let Ok(case) = std::env::var(rank::CASE) {
        rank::main(&case);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_conforms() {
    if !library("cuda_nccl_conforms") {
        return;
    }
    for n in 1..=4 {
        let (outputs, time) = launch(n, "conformance", &[]);
        let conform = |(rank, output)| prints(output, &format!("rank {rank} conforms"));
        expect(
            outputs.iter().enumerate().all(conform),
            "conformance",
            &outputs,
        );
        println!("{n} ranks conform after {time:.1?}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_16_bit_sums_are_within_tolerance() {
    if !library("cuda_nccl_16_bit_sums_are_within_tolerance") {
        return;
    }
    for n in 2..=4 {
        let (outputs, _) = launch(n, "sums", &[]);
        expect(
            outputs
                .iter()
                .all(|o| o.status.success() && prints(o, "within")),
            "sums",
            &outputs,
        );
    }
}

/// Every fault ends all remaining processes within the limit, with an error that names the cause.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_faults_end_all_ranks() {
    if !library("cuda_nccl_faults_end_all_ranks") {
        return;
    }
    let faults = [
        // The connection of a killed process ends with or without an error; both messages name the
        // rank.
        ("killed-before", "rank 1"),
        ("killed-during", "rank 1"),
        ("killed-after", "rank 1"),
        ("killed-0", "rank 0"),
        ("killed-behind", "rank 1"),
        ("killed-with-graph", "rank 1"),
        ("stalled", "rank 1 did not reach it within"),
        ("count", "all_reduce(sum) of 8192 x fp32"),
        (
            "pair",
            "rank 1 sends 10 elements to rank 2, which receives 11 from it",
        ),
        ("kind", "broadcast of 4096 x fp32"),
        ("dtype", "all_reduce(sum) of 4096 x u8"),
        ("order", "barrier"),
        ("abort", "rank 1 aborted: on purpose"),
        ("leaves", "rank 1 left after 1 collectives"),
        ("poison", "rank 1 failed before running it"),
        ("split", "rank 1"),
    ];

    for (kind, text) in faults {
        let (outputs, time) = launch(3, kind, &[]);
        let failed = outputs
            .iter()
            .filter(|o| prints(o, "saw:") && prints(o, text))
            .count();
        let one_ends = kind.starts_with("killed") || ["leaves", "split"].contains(&kind);
        let survivors = if one_ends { 2 } else { 3 };
        expect(
            failed == survivors && time < rank::FAULT_LIMIT + Duration::from_secs(60),
            kind,
            &outputs,
        );
        println!("{kind}: {failed} ranks failed with '{text}' after {time:.1?}");
    }
}

/// A fault in one of two groups ends the ranks of both, and is named by its rank in the world.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_faults_in_a_group_end_all_ranks() {
    if !library("cuda_nccl_faults_in_a_group_end_all_ranks") {
        return;
    }
    for (kind, text) in [
        ("group-killed", "rank 3"),
        ("group-stalled", "rank 3 did not reach it within"),
        ("group-count", "rank 3"),
        ("group-abort", "rank 3 aborted: on purpose"),
    ] {
        let (outputs, time) = launch(4, kind, &[]);
        let failed = outputs
            .iter()
            .filter(|o| prints(o, "saw:") && prints(o, text))
            .count();
        let survivors = if kind == "group-killed" { 3 } else { 4 };
        expect(
            failed == survivors && time < rank::FAULT_LIMIT + Duration::from_secs(60),
            kind,
            &outputs,
        );
        println!("{kind}: {failed} ranks failed with '{text}' after {time:.1?}");
    }
}

/// Ranks that call two communicators in another order are named, though nothing waits forever here.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_order_of_communicators_is_checked() {
    if !stand_in("cuda_nccl_order_of_communicators_is_checked") {
        return;
    }
    let (outputs, _) = launch(4, "communicators", &[]);
    let named = outputs.iter().any(|output| {
        let text = String::from_utf8_lossy(&output.stderr);
        text.contains("have enqueued different numbers of operations on")
    });
    let failed = |o: &Output| prints(o, "saw:") && prints(o, "invalid usage");
    expect(
        named && outputs[2..].iter().all(failed),
        "communicators",
        &outputs,
    );
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_library_errors_end_all_ranks() {
    if !stand_in("cuda_nccl_library_errors_end_all_ranks") {
        return;
    }
    let (outputs, _) = launch(
        3,
        "abort-by-library",
        &[("ZERO_STANDIN_NCCL_ERROR_AT", "1:1")],
    );
    // Either the call or the watcher sees it first.
    let failed = |o: &Output| prints(o, "saw: rank 1: ") && prints(o, ": unhandled system error");
    expect(
        outputs.iter().all(failed),
        "an error of the library",
        &outputs,
    );
}
