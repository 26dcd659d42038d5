//! Tests of the rendezvous: addresses, limits and tokens. Strangers: `tests/hostile.rs`.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::super::frames::frame;
use super::super::handshake::{Hello, Key, MAX_HELLO_BYTES, VERSION};
use super::super::message::Message;
use super::super::server::{self, Options};
use super::super::testing::{LIBRARY, LONG, free_port, join_as, ranks};
use super::super::tests::{connect, greet, on_ranks};
use super::super::wire::{Incoming, send};
use super::super::{Ranks, Token};
use super::{Joined, REJECTIONS, join};
use crate::{CommError, RendezvousError};

/// A limit that expires.
const SHORT: Duration = Duration::from_millis(300);
const SECRET: &str = "0123456789abcdef";

fn refusal(result: Result<Joined, CommError>) -> RendezvousError {
    match result {
        Err(CommError::Rendezvous(error)) => error,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("the rendezvous succeeded"),
    }
}

fn token(secret: &str) -> Option<Token> {
    Some(Token::new(secret).unwrap())
}

fn key(secret: &str) -> Key {
    Key::new(token(secret).as_ref())
}

/// NCCL may need a second for its id. Connections that arrive meanwhile must not fill the queue of
/// those that rank 0 accepts, which it needs itself.
#[test]
fn connections_before_the_coordinator_do_not_block_rank_0() {
    let port = free_port();
    let crowd = |port| {
        let connect = || {
            TcpStream::connect_timeout(&([127, 0, 0, 1], port).into(), Duration::from_millis(50))
                .ok()
        };
        (0..200).map_while(|_| connect()).collect::<Vec<_>>()
    };

    let mut connections = Vec::new();
    let make_id = || {
        connections = crowd(port);
        Ok(vec![7; 128])
    };

    assert!(
        join(
            &ranks(0, 1, port),
            LIBRARY,
            make_id,
            Duration::from_secs(12)
        )
        .is_ok()
    );
}

#[test]
fn all_ranks_receive_the_id() {
    for joined in on_ranks(5, |ranks| {
        // Rank 0 starts last.
        std::thread::sleep(Duration::from_millis(40 * (5 - ranks.rank) as u64));
        join_as(&ranks, LONG).map(|joined| joined.id)
    }) {
        assert_eq!(joined.unwrap(), [7; 128]);
    }
}

#[test]
fn differing_hello_is_refused_on_all_ranks() {
    let hello = |rank, version, world_size, library| Hello {
        version,
        rank,
        world_size,
        library,
    };

    let cases = [
        (
            hello(1, VERSION + 1, 2, LIBRARY),
            RendezvousError::Version {
                rank: 1,
                got: VERSION + 1,
                expected: VERSION,
            },
        ),
        (
            hello(1, VERSION, 2, 22_809),
            RendezvousError::Library {
                rank: 1,
                got: 22_809,
                expected: LIBRARY,
            },
        ),
        (
            hello(0, VERSION, 2, LIBRARY),
            RendezvousError::Twice { rank: 0 },
        ),
        (
            hello(1, VERSION, 3, LIBRARY),
            RendezvousError::WorldSize {
                rank: 1,
                got: 3,
                expected: 2,
            },
        ),
        (
            hello(2, VERSION, 2, LIBRARY),
            RendezvousError::WorldSize {
                rank: 2,
                got: 2,
                expected: 2,
            },
        ),
    ];

    for (hello, expected) in cases {
        let port = free_port();
        let first = std::thread::spawn(move || refusal(join_as(&ranks(0, 2, port), LONG)));
        let stream = connect(port);
        let answer = greet(&stream, &Key::new(None), &hello).next(LONG).unwrap();
        assert_eq!(
            answer,
            Some(Message::Refused {
                error: expected.clone()
            })
        );
        assert_eq!(first.join().unwrap(), expected);
    }
}

#[test]
fn missing_ranks_are_named() {
    let refused = refusal(join_as(&ranks(0, 3, free_port()), SHORT));
    let RendezvousError::Missing {
        ranks,
        world_size: 3,
        ..
    } = refused
    else {
        panic!("{refused}")
    };
    assert!(ranks.ends_with(&[1, 2]), "{ranks:?}");
}

#[test]
fn rank_that_ends_during_rendezvous_is_named() {
    let port = free_port();
    let first = std::thread::spawn(move || refusal(join_as(&ranks(0, 3, port), LONG)));
    let stream = connect(port);
    greet(&stream, &Key::new(None), &Hello::new(2, 3, LIBRARY));
    drop(stream);
    assert_eq!(first.join().unwrap(), RendezvousError::Died { rank: 2 });
}

#[test]
fn unusable_addresses_are_errors() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let refused = refusal(join_as(&ranks(0, 2, port), SHORT));
    assert_eq!(
        refused,
        RendezvousError::AddressInUse {
            address: address.clone()
        }
    );
    assert!(refused.to_string().contains("MASTER_PORT"));
    drop(listener);
    let refused = refusal(join_as(&ranks(1, 2, port), SHORT));
    assert!(
        matches!(&refused, RendezvousError::Unreachable { rank: 1, address: a, .. } if *a == address),
        "{refused}"
    );
    let unknown = Ranks {
        host: "no-such-host.invalid".to_owned(),
        one_machine: false,
        token: Some(Token::new("none").unwrap()),
        ..ranks(1, 2, port)
    };

    assert!(matches!(
        refusal(join_as(&unknown, SHORT)),
        RendezvousError::Unreachable { .. }
    ));
}

#[test]
fn rank_with_another_token_is_dropped() {
    let port = free_port();
    let with = |rank, secret| Ranks {
        token: token(secret),
        ..ranks(rank, 2, port)
    };

    let first = with(0, SECRET);
    let first = std::thread::spawn(move || refusal(join_as(&first, Duration::from_secs(8))));
    for secret in ["fedcba9876543210", "none"] {
        let error = refusal(join_as(&with(1, secret), LONG));
        assert!(
            matches!(error, RendezvousError::Dropped { rank: 1, .. }),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("set the same ZERO_TOKEN on all ranks"),
            "{error}"
        );
        assert!(
            !error.to_string().contains(secret) || secret == "none",
            "{error}"
        );
    }

    let error = first.join().unwrap();
    let RendezvousError::Missing {
        ranks, strangers, ..
    } = &error
    else {
        panic!("{error}")
    };

    assert!(ranks[..] == [1] && *strangers > 1, "{error}");
    assert!(
        error
            .to_string()
            .contains("connections came without the right ZERO_TOKEN"),
        "{error}"
    );
    assert!(!error.to_string().contains(SECRET), "{error}");
}

/// Accepts a connection as the coordinator does, up to its proof.
fn challenge(listener: &TcpListener) -> (TcpStream, Incoming) {
    let mut stream = listener.accept().unwrap().0;
    let key = Key::new(None);
    let mut incoming = Incoming::new(stream.try_clone().unwrap());
    let (challenge, expected) = key
        .challenge(incoming.next_frame(LONG, MAX_HELLO_BYTES).unwrap().unwrap())
        .unwrap();
    stream.write_all(&frame(&challenge).unwrap()).unwrap();
    assert!(expected.matches(incoming.next_frame(LONG, MAX_HELLO_BYTES).unwrap().unwrap()));
    (stream, incoming)
}

/// Rank 0 closes connections for lack of places: before the challenge, more often than for another
/// token, and after it.
#[test]
fn rank_without_a_place_tries_again() {
    let ranks = ranks(1, 2, free_port());
    let listener = TcpListener::bind(("127.0.0.1", ranks.port)).unwrap();
    std::thread::scope(|scope| {
        let joining = scope.spawn(|| join_as(&ranks, LONG).map(|joined| joined.id));
        for _ in 0..=REJECTIONS {
            let _crowded = listener.accept().unwrap();
            std::thread::sleep(server::SILENT_LIMIT);
        }
        drop(challenge(&listener));
        let (stream, _incoming) = challenge(&listener);
        send(
            &stream,
            &[Message::Welcome {
                id: vec![7],
                report_every: SHORT,
            }],
        )
        .unwrap();
        assert_eq!(joining.join().unwrap().unwrap(), [7]);
    });
}

/// A connection that ended says more than the refused connections after it. One that ended after
/// rank 0 had proved the token was the coordinator's: without it there is nothing to wait for.
#[test]
fn end_of_the_coordinator_hides_no_cause() {
    for (proves, limit) in [(false, Duration::from_secs(3)), (true, LONG)] {
        let ranks = ranks(1, 2, free_port());
        let listener = TcpListener::bind(("127.0.0.1", ranks.port)).unwrap();
        let begun = Instant::now();
        let error = std::thread::scope(|scope| {
            let joining = scope.spawn(|| refusal(join_as(&ranks, limit)));
            let connection = if proves {
                challenge(&listener).0
            } else {
                listener.accept().unwrap().0
            };
            std::thread::sleep(server::SILENT_LIMIT);
            drop(listener);
            drop(connection);
            joining.join().unwrap()
        });
        let expected = if proves {
            "ended before all ranks had joined"
        } else {
            "ZERO_TOKEN is probably another"
        };
        assert!(error.to_string().contains(expected), "{error}");
        assert!(begun.elapsed() < LONG / 2, "{error}");
    }
}

#[test]
fn several_machines_need_a_token() {
    for rank in 0..2 {
        let ranks = Ranks {
            one_machine: false,
            ..ranks(rank, 2, free_port())
        };
        let error = refusal(join_as(&ranks, LONG));
        assert_eq!(error, RendezvousError::NoToken);
        for text in [
            "export ZERO_TOKEN=$(openssl rand -hex 16)",
            "-x ZERO_TOKEN",
            "ZERO_TOKEN=none",
        ] {
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}

/// The program at rank 0's address is another.
#[test]
fn program_without_the_token_is_not_rank_0() {
    let ranks = Ranks {
        token: token(SECRET),
        ..ranks(1, 2, free_port())
    };

    let listener = TcpListener::bind(("127.0.0.1", ranks.port)).unwrap();
    let wrong = key("fedcba9876543210").challenge(b"hello").unwrap().0;
    for answer in [
        frame(&wrong).unwrap(),
        frame(&[0; 3]).unwrap(),
        b"HTTP/1.1 400 Bad Request\r\n".to_vec(),
    ] {
        let error = std::thread::scope(|scope| {
            let joining = scope.spawn(|| refusal(join_as(&ranks, LONG)));
            let mut stream = listener.accept().unwrap().0;
            stream.write_all(&answer).unwrap();
            joining.join().unwrap()
        });
        assert!(
            matches!(error, RendezvousError::NotRankZero { rank: 1, .. }),
            "{error}"
        );
        assert!(error.to_string().contains("MASTER_PORT"), "{error}");
    }
}

/// Connected, but never answered: one limit for connecting and waiting.
#[test]
fn join_ends_within_its_limit() {
    let ranks = ranks(1, 2, free_port());
    let listener = TcpListener::bind(("127.0.0.1", ranks.port)).unwrap();
    let begun = Instant::now();
    let error = refusal(join_as(&ranks, Duration::from_secs(1)));
    // A limit twice and a grace of 5 s would be 7 s.
    assert!(
        begun.elapsed() < Duration::from_secs(6),
        "{:?}",
        begun.elapsed()
    );
    assert!(
        error
            .to_string()
            .contains("accepted the connection, but did not answer"),
        "{error}"
    );
    drop(listener);
}

/// The last quarter of the limit is left for NCCL.
#[test]
fn ranks_have_three_quarters_of_the_limit() {
    let error = refusal(join_as(&ranks(0, 2, free_port()), Duration::from_secs(4)));
    let limit = Duration::from_secs(3);
    assert_eq!(
        error,
        RendezvousError::Missing {
            ranks: vec![1],
            world_size: 2,
            limit,
            strangers: 0
        }
    );
}

/// Rank 0's name resolves to 127.0.0.1 on its machine, and to another address elsewhere.
#[test]
fn several_machines_reach_rank_0_despite_its_name() {
    let other_addresses = ["127.0.0.2", "127.0.0.3"];
    let joined = on_ranks(3, |ranks| {
        let host = if ranks.rank == 0 {
            "localhost"
        } else {
            other_addresses[ranks.rank - 1]
        };
        let ranks = Ranks {
            host: host.to_owned(),
            one_machine: false,
            token: token(SECRET),
            ..ranks
        };
        join_as(&ranks, LONG).map(|joined| joined.id.len())
    });
    assert!(joined.iter().all(Result::is_ok), "{joined:?}");
}

#[test]
fn one_machine_listens_on_loopback_only() {
    let port = free_port();
    let first = std::thread::spawn(move || {
        join_as(
            &Ranks {
                host: "a-name-that-is-not-looked-up.invalid".to_owned(),
                ..ranks(0, 2, port)
            },
            LONG,
        )
        .is_ok()
    });
    let probe = connect(port);
    assert!(TcpStream::connect(("127.0.0.2", port)).is_err());
    drop(probe);
    assert!(join_as(&ranks(1, 2, port), LONG).is_ok());
    assert!(first.join().unwrap());
}

/// The variable that makes this test program run a part of `missing_resources_are_named` in another
/// process.
const DESCRIPTORS: &str = "ZERO_TEST_DESCRIPTORS";

/// The entry point of processes with few file descriptors or little memory; without the variable it
/// does nothing.
#[test]
fn descriptors_process() {
    let Ok(case) = std::env::var(DESCRIPTORS) else {
        return;
    };
    let limit = |current: u64, maximum: u64| {
        setrlimit(
            Resource::Nofile,
            Rlimit {
                current: Some(current),
                maximum: Some(maximum),
            },
        )
        .unwrap();
    };

    let port = free_port();
    match &case[..] {
        "hard" => {
            limit(100, 200);
            let error = refusal(join_as(&ranks(0, 500, port), LONG));
            let RendezvousError::Descriptors {
                needed,
                limit: 200,
                world_size: 500,
            } = error
            else {
                panic!("{error}")
            };
            assert!(
                error.to_string().contains(&format!("`ulimit -n {needed}`")),
                "{error}"
            );
        }
        "soft" => {
            limit(40, 4000);
            let joined = on_ranks(60, |ranks| {
                // The other ranks are threads of this process, and rank 0 raises the limit.
                while ranks.rank > 0 && getrlimit(Resource::Nofile).current == Some(40) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                join_as(&ranks, LONG).map(|joined| joined.id.len())
            });
            assert!(joined.iter().all(Result::is_ok), "{joined:?}");
            assert!(getrlimit(Resource::Nofile).current > Some(120));
        }
        "accept" => {
            limit(120, 120);
            let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
            let key = Key::new(None);
            let id = vec![7];
            let join_limit = LONG;
            let options = Options {
                world_size: 2,
                library: LIBRARY,
                key: key.clone(),
                id,
                join_limit,
                limit: LONG,
            };
            server::start(listener, None, options).unwrap();
            let stream = connect(port);
            let mut first = greet(&stream, &key, &Hello::new(0, 2, LIBRARY));
            let open = || std::fs::File::open("/dev/null");
            let mut files: Vec<_> = std::iter::repeat_with(open).map_while(Result::ok).collect();
            files.pop();
            // Takes the last descriptor, so that none is left for the coordinator's end.
            let _second = connect(port);
            let answer = first.next(LONG).unwrap();
            let Some(Message::Refused {
                error: RendezvousError::Descriptors { limit: 120, .. },
            }) = answer
            else {
                panic!("{answer:?}")
            };
        }
        "thread" => {
            // No memory is left for a thread's stack.
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let used = status
                .lines()
                .find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix(" kB"));
            let bytes = Some((used.unwrap().parse::<u64>().unwrap() + 1024) * 1024);
            setrlimit(
                Resource::As,
                Rlimit {
                    current: bytes,
                    maximum: bytes,
                },
            )
            .unwrap();
            let error = refusal(join_as(&ranks(0, 2, port), LONG)).to_string();
            assert!(
                error.starts_with("rank 0: failed to start the coordinator's thread"),
                "{error}"
            );
        }
        other => panic!("{other}"),
    }

    println!("{DESCRIPTORS} ended");
}

#[test]
fn missing_resources_are_named() {
    // Linux only: the memory in use is in /proc.
    let cases = if cfg!(target_os = "linux") {
        &["hard", "soft", "accept", "thread"][..]
    } else {
        &["hard", "soft", "accept"]
    };
    for &case in cases {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "--nocapture",
            "world::rendezvous::tests::descriptors_process",
        ]);
        let output = command.env(DESCRIPTORS, case).output().unwrap();
        let ended =
            String::from_utf8_lossy(&output.stdout).contains(&format!("{DESCRIPTORS} ended"));
        assert!(ended && output.status.success(), "{case}: {output:?}");
    }
}
