//! Ranks as processes over NCCL: this program starts itself, once a rank, and judges what comes back.
//!
//! On a machine with fewer GPUs than ranks they share one, which NCCL allows from 2.30 on. Without NCCL the tests say
//! that they are skipped, and fail where `ZERO_REQUIRE_NCCL` is set (integration-tests/stand-ins/with-stand-ins does
//! so).

#[path = "nccl/rank.rs"]
mod rank;

use std::io::Write;
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use zero_comm::{CommError, nccl};

/// Longer than any world here lives.
const LIFE: Duration = Duration::from_secs(240);

/// A visible word that a test is skipped.
fn skipped(test: &str, why: &str) -> bool {
    // Straight to the stream: the test harness would swallow `eprintln!`.
    let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {why}\n").as_bytes());
    false
}

/// Whether there is an NCCL to test.
fn library(test: &str) -> bool {
    match nccl::version() {
        Ok(version) => println!("NCCL {version}"),
        Err(error @ CommError::NoLibrary { .. }) if std::env::var_os("ZERO_REQUIRE_NCCL").is_none() => {
            return skipped(test, &error.to_string());
        }
        Err(error) => panic!("{error}"),
    }
    true
}

/// Whether the stand-in is the NCCL to test.
fn stand_in(test: &str) -> bool {
    library(test) && (rank::is_stand_in() || skipped(test, "only the stand-in can be told to behave so"))
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

/// Runs `what` as `n` processes; what each printed, and how long all took.
fn launch(n: usize, what: &str, more: &[(&str, &str)]) -> (Vec<Output>, Duration) {
    let begun = Instant::now();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let spawn = |rank: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        // Its own entry point, below.
        command.args(["--ignored", "--exact", "--nocapture", "cuda_rank_of_a_world"]);
        command.env(rank::WHAT, what).env("RANK", rank.to_string()).env("WORLD_SIZE", n.to_string());
        command.env("LOCAL_RANK", rank.to_string()).env("MASTER_ADDR", "127.0.0.1");
        command.env("MASTER_PORT", port.to_string()).env("RUST_BACKTRACE", "0");
        command.env("NCCL_MULTI_RANK_GPU_ENABLE", "1").env("NCCL_MAX_CTAS", "8");
        command.envs(more.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<Child> = (0..n).map(spawn).collect();
    let outputs = children.into_iter().map(|child| finish(child, begun + LIFE)).collect();
    (outputs, begun.elapsed())
}

fn expect(ok: bool, what: &str, outputs: &[Output]) {
    let text: Vec<String> = outputs
        .iter()
        .enumerate()
        .map(|(rank, o)| {
            let (out, err) = (String::from_utf8_lossy(&o.stdout), String::from_utf8_lossy(&o.stderr));
            format!("--- rank {rank}: {}\n{out}{err}", o.status)
        })
        .collect();
    assert!(ok, "{what}\n{}", text.join("\n"));
}

fn says(output: &Output, words: &str) -> bool {
    String::from_utf8_lossy(&output.stdout).contains(words)
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_rank_of_a_world() {
    // Nothing, unless a test below started this process.
    if let Ok(what) = std::env::var(rank::WHAT) {
        rank::main(&what);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_conforms_with_one_to_four_ranks() {
    if !library("cuda_nccl_conforms_with_one_to_four_ranks") {
        return;
    }
    for n in 1..=4 {
        let (outputs, time) = launch(n, "conformance", &[]);
        let conform = |(rank, output)| says(output, &format!("rank {rank} conforms"));
        expect(outputs.iter().enumerate().all(conform), "conformance", &outputs);
        println!("{n} ranks conform after {time:.1?}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_sums_of_16_bits_are_within_the_stated_tolerance_and_repeat() {
    if !library("cuda_nccl_sums_of_16_bits_are_within_the_stated_tolerance_and_repeat") {
        return;
    }
    for n in 2..=4 {
        let (outputs, _) = launch(n, "sums", &[]);
        expect(outputs.iter().all(|o| o.status.success() && says(o, "within")), "sums", &outputs);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_registers_pools_that_all_ranks_can_share() {
    if !library("cuda_nccl_registers_pools_that_all_ranks_can_share") {
        return;
    }
    for n in 2..=3 {
        let (outputs, _) = launch(n, "registers", &[]);
        expect(outputs.iter().all(|o| o.status.success() && says(o, "registered")), "registers", &outputs);
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_goes_on_where_no_memory_can_be_shared() {
    if !stand_in("cuda_nccl_goes_on_where_no_memory_can_be_shared") {
        return;
    }
    let (outputs, _) = launch(2, "registers-nothing", &[("ZERO_STANDIN_SHARING", "0")]);
    expect(outputs.iter().all(|o| o.status.success() && says(o, "registered nothing")), "nothing", &outputs);
}

/// Every fault ends every process that is still there within the limit, with the words of its cause.
#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_every_fault_ends_all_ranks_with_its_cause() {
    if !library("cuda_nccl_every_fault_ends_all_ranks_with_its_cause") {
        return;
    }
    let faults = [
        // The end of a killed process is seen as a connection that ends or as one that breaks: both name the rank.
        ("killed-before", "rank 1"),
        ("killed-during", "rank 1"),
        ("killed-after", "rank 1"),
        ("killed-0", "rank 0"),
        ("killed-behind", "rank 1"),
        ("killed-with-graph", "rank 1"),
        ("stalled", "rank 1 did not come within"),
        ("count", "all_reduce(sum) of 8192 x fp32"),
        ("kind", "broadcast of 4096 x fp32"),
        ("dtype", "all_reduce(sum) of 4096 x u8"),
        ("order", "barrier"),
        ("abort", "rank 1 aborted: on purpose"),
        ("leaves", "rank 1 left after 1 collectives"),
        ("poison", "rank 1 failed before it ran"),
        ("split", "rank 1"),
    ];
    for (kind, words) in faults {
        let (outputs, time) = launch(3, kind, &[]);
        let told = outputs.iter().filter(|o| says(o, "saw:") && says(o, words)).count();
        let gone = kind.starts_with("killed") || ["leaves", "split"].contains(&kind);
        let survivors = if gone { 2 } else { 3 };
        expect(told == survivors && time < rank::FAULT_LIMIT + Duration::from_secs(60), kind, &outputs);
        println!("{kind}: {told} ranks said '{words}' after {time:.1?}");
    }
}

#[test]
#[ignore = "needs a CUDA device"]
fn cuda_nccl_an_error_of_the_library_ends_all_ranks() {
    if !stand_in("cuda_nccl_an_error_of_the_library_ends_all_ranks") {
        return;
    }
    let (outputs, _) = launch(3, "abort-by-library", &[("ZERO_STANDIN_NCCL_ERROR_AT", "1:1")]);
    // It is seen by the call that is waited for, or by the watcher.
    let told = |o: &Output| says(o, "saw: rank 1: ") && says(o, ": unhandled system error");
    expect(outputs.iter().all(told), "an error of the library", &outputs);
}
