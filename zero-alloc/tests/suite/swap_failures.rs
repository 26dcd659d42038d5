//! The swap file where the kernel refuses rings, and in processes that end early.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use zero_alloc::device::Stream;
use zero_alloc::swap::{Fault, SwapEngine, SwapFile, SwapOptions};

use crate::swap::{Buffer, LIMIT, assert_round_trip, engines, file, folder, options, stream};

/// Makes `io_uring_setup` fail with `errno` for this thread and those that it starts, as containers
/// and limits do.
fn refuse_io_uring(errno: i32) {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        op(LOAD, 0, 0, 0), // the number of the call
        op(IF_EQUAL, 0, 1, libc::SYS_io_uring_setup as u32),
        op(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        op(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: changes this thread only.
    let result = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(result, 0);
    // SAFETY: a valid program, which the kernel copies.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) };
    assert_eq!(result, 0);
}

#[test]
fn refused_io_uring_is_replaced_and_named() {
    let refused = std::thread::spawn(|| {
        refuse_io_uring(libc::EPERM);
        let dir = folder();
        let error = SwapFile::create(
            dir.path(),
            0,
            SwapOptions::default().engine(SwapEngine::IoUring),
        );
        assert!(
            error
                .expect_err("refused")
                .to_string()
                .contains("io_uring_setup: Operation not permitted")
        );
        let file = file(dir.path(), 16, options(SwapEngine::Auto));
        let notices = file.notices();
        assert!(
            notices[0].contains("4 threads a lane") && notices[0].contains("seccomp"),
            "{notices:?}"
        );
        let lane = file.lane().expect("a lane");
        let stream = stream("swap");
        assert_round_trip(&lane, &stream, &Buffer::filled(16, 7));
    });

    refused.join().expect("no panic");
}

#[test]
fn lane_beyond_the_limit_of_locked_memory_uses_threads() {
    if engines().len() < 2 {
        return eprintln!("NOT TESTED: no io_uring here");
    }
    let limited = std::thread::spawn(|| {
        let dir = folder();
        let [auto, ring_only] =
            [SwapEngine::Auto, SwapEngine::IoUring].map(|e| file(dir.path(), 16, options(e)));
        refuse_io_uring(libc::ENOMEM);
        let error = ring_only
            .lane()
            .expect_err("no rings but io_uring's")
            .to_string();
        assert!(
            error.contains("make a lane") && error.contains("ulimit -l"),
            "{error}"
        );

        let lane = auto.lane().expect("threads");
        let stream = stream("swap");
        let notices = auto.notices();
        assert!(
            notices[0].contains("4 threads a lane") && notices[0].contains("raise ulimit -l"),
            "{notices:?}"
        );
        let from = Buffer::filled(16, 7);
        lane.register(std::slice::from_ref(&from.0));
        assert_round_trip(&lane, &stream, &from);
    });

    limited.join().expect("no panic");
}

/// Runs the test `name` of this program, which is ignored otherwise, in its own process with
/// `argument`.
fn child(name: &str, argument: &str) -> Child {
    let program = std::env::current_exe().expect("a program");
    let mut command = Command::new(program);
    command
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env("ZERO_SWAP_TEST", argument);
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("started")
}

/// The argument of this process, if [`child`] started it.
fn argument() -> Option<String> {
    std::env::var("ZERO_SWAP_TEST").ok()
}

#[test]
#[ignore = "a process that another test kills"]
fn child_writes_and_waits() {
    let Some(dir) = argument() else { return };
    let file = file(dir.as_ref(), 256, SwapOptions::default());
    let stream = stream("swap");
    let from = Buffer::filled(256, 1);
    file.lane()
        .expect("a lane")
        .write(&stream, &[(0, from.slice())])
        .expect("enqueued");
    stream.synchronize(LIMIT).expect("written");
    println!("\nwritten");
    std::thread::sleep(LIMIT);
}

#[test]
fn killed_process_leaves_nothing() {
    let dir = folder();
    let mut runs = [(); 2].map(|()| {
        child(
            "swap_failures::child_writes_and_waits",
            &dir.path().to_string_lossy(),
        )
    });

    for run in &mut runs {
        let output = BufReader::new(run.stdout.take().expect("piped"));
        assert!(
            output
                .lines()
                .any(|line| line.is_ok_and(|line| line == "written"))
        );
    }

    // No other run sees the files, and their space goes with the process: they have no name (see
    // the crate's test).
    assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 0);
    for run in &mut runs {
        run.kill().expect("running");
        assert_eq!(run.wait().expect("ended").signal(), Some(libc::SIGKILL));
    }

    assert_eq!(std::fs::read_dir(dir.path()).expect("a folder").count(), 0);
}

#[test]
#[ignore = "a process that aborts"]
fn child_waits_for_a_lost_request() {
    let Some(engine) = argument() else { return };
    let engine = if engine == "IoUring" {
        SwapEngine::IoUring
    } else {
        SwapEngine::Threads
    };
    let dir = folder();
    let buffer = Buffer::new(4);
    let file = file(
        dir.path(),
        4,
        options(engine).limit(Duration::from_millis(50)),
    );
    file.inject(1, Fault::Never);
    file.lane()
        .expect("a lane")
        .write(&stream("swap"), &[(0, buffer.slice())])
        .expect("enqueued");
    std::thread::sleep(LIMIT);
}

/// Returning would let the program reuse a buffer that the kernel may still read.
#[test]
fn lost_request_aborts_the_process() {
    for engine in engines() {
        let mut run = child(
            "swap_failures::child_waits_for_a_lost_request",
            &format!("{engine:?}"),
        );
        let mut text = String::new();
        run.stderr
            .take()
            .expect("piped")
            .read_to_string(&mut text)
            .expect("text");
        assert_eq!(
            run.wait().expect("ended").signal(),
            Some(libc::SIGABRT),
            "{text}"
        );
        assert!(
            text.contains("write of 8192 bytes at offset 8192")
                && text.contains("took longer than 50ms"),
            "{text}"
        );
    }
}
