//! Errors of the six crates: no text is printed twice along a chain of sources, and causes are
//! reachable.
//!
//! An error's text is the whole message, with its cause, and `source()` never returns what the text
//! contains: programs that print the chain would print it twice, and those that print one error
//! would lose it. Variants that wrap an error are transparent, and the causes of others are fields.
//! `DeviceError::cause` returns the `CommError` of a collective that failed on a stream.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use zero_alloc::device::{Cause, Device, DeviceError, Stream};
use zero_alloc::host::HostDevice;
use zero_alloc::{AllocError, Pool};
use zero_ckpt::CkptError;
use zero_comm::threads::World;
use zero_comm::{BucketError, CommError, CommOptions, Communicator, PrefetchError};
use zero_kernels::KernelError;
use zero_kernels::cuda::CudaError;
use zero_optim::{CheckpointError, OptimError};

/// A variant with a source is transparent, so its text is that of its source and its chain goes on
/// behind it.
#[test]
fn variants_with_a_source_are_transparent() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut sources = 0;
    for name in [
        "zero-shard",
        "zero-alloc",
        "zero-kernels",
        "zero-comm",
        "zero-optim",
        "zero-ckpt",
    ] {
        let mut files: Vec<PathBuf> = vec![root.join(name).join("src")];
        while let Some(path) = files.pop() {
            if path.is_dir() {
                files.extend(
                    std::fs::read_dir(path)
                        .unwrap()
                        .map(|entry| entry.unwrap().path()),
                );
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let mut message = None;
            for line in text.lines() {
                let field = line.trim_start().trim_start_matches("pub ");
                if field.starts_with("#[error(") {
                    message = Some(field);
                }
                if let Some(message) = message
                    && (field.contains("#[from]")
                        || field.contains("#[source]")
                        || field.starts_with("source: "))
                {
                    assert_eq!(
                        message,
                        "#[error(transparent)]",
                        "{}: {line}",
                        path.display()
                    );
                    sources += 1;
                }
            }
        }
    }

    assert!(sources > 10, "no errors found: have the sources moved?");
}

#[test]
fn no_text_is_printed_twice() {
    let comm = || CommError::Aborted {
        rank: 1,
        reason: "the disk is full".into(),
    };

    let device = || DeviceError::Operation {
        stream: "comm".into(),
        op: "all_gather".into(),
        cause: Cause::new(comm()),
    };

    let io = || CkptError::Io {
        action: "write",
        path: "dir".into(),
        error: std::io::Error::other("the disk is full"),
    };

    let cuda = || CudaError::NoNvrtc {
        tried: vec!["the disk is full".into()],
    };
    let errors: Vec<Box<dyn Error>> = vec![
        Box::new(device()),
        Box::new(AllocError::Device(device())),
        Box::new(KernelError::Device(device())),
        Box::new(KernelError::Cuda(cuda())),
        Box::new(CommError::Device(device())),
        Box::new(CommError::Alloc(AllocError::Device(device()))),
        Box::new(BucketError::Alloc(AllocError::Device(device()))),
        Box::new(BucketError::Comm(comm())),
        Box::new(BucketError::Kernel(KernelError::Device(device()))),
        Box::new(BucketError::Device(device())),
        Box::new(PrefetchError::Alloc(AllocError::Device(device()))),
        Box::new(PrefetchError::Comm(comm())),
        Box::new(PrefetchError::Device(device())),
        Box::new(OptimError::Alloc(AllocError::Device(device()))),
        Box::new(OptimError::Kernel(KernelError::Device(device()))),
        Box::new(OptimError::Device(device())),
        Box::new(io()),
        Box::new(CheckpointError::Ckpt(io())),
        Box::new(CheckpointError::Optim(OptimError::Device(device()))),
    ];

    for error in errors {
        let mut chain = vec![error.to_string()];
        let mut next = error.source();
        while let Some(source) = next {
            chain.push(source.to_string());
            next = source.source();
        }
        assert_eq!(
            chain.join(": ").matches("the disk is full").count(),
            1,
            "{chain:?}"
        );
        assert!(
            chain.windows(2).all(|two| !two[0].contains(&two[1])),
            "{chain:?}"
        );
    }
}

#[test]
fn failed_collective_is_the_cause_of_its_stream() {
    let device = HostDevice::new();
    let limit = Duration::from_secs(60);
    let stream = device.create_stream("comm").unwrap();
    let pool = Pool::new(device, 1 << 20);
    let comms = World::new(2, CommOptions::default()).unwrap();
    comms[1].abort("the disk is full");
    comms[0]
        .exchange(&pool, &stream, b"message", limit)
        .unwrap_err();
    let error = stream.synchronize(limit).unwrap_err();

    assert!(
        matches!(
            error.cause::<CommError>(),
            Some(CommError::Aborted { rank: 1, .. })
        ),
        "{error:?}"
    );

    assert!(
        error
            .to_string()
            .contains("rank 1 aborted: the disk is full"),
        "{error}"
    );
    assert_eq!(error.cause::<OptimError>(), None);
}
