//! Ranks that meet, watch and end, without any library or device: processes are threads here, each with a connection
//! of its own to the hub, and collectives are flags.

use std::io::Write;
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zero_alloc::device::{DType, DeviceError};

use super::abort::AbortCompletion;
use super::message::{Message, VERSION};
use super::rendezvous::{Joined, join};
use super::wire::{Incoming, send};
use super::world::{Operation, Transport, World};
use super::{Launcher, Ranks};
use crate::call::{Call, Segments};
use crate::split_request::SplitRequest;
use crate::{Collective, CommError, RendezvousError};

const LIBRARY: u64 = 23_007;
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(30);
/// For faults that show as a limit that passes.
const SHORT: Duration = Duration::from_millis(300);

/// A port that nobody else takes meanwhile: below those that the system gives to clients, each only once.
fn free_port() -> u16 {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let port = 10_000 + (std::process::id() as usize * 64 + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000;
        if TcpListener::bind(("127.0.0.1", port as u16)).is_ok() {
            return port as u16;
        }
    }
}

fn ranks(rank: usize, world_size: usize, port: u16) -> Ranks {
    let (host, launcher) = ("127.0.0.1".to_owned(), Launcher::Torchrun);
    Ranks { rank, world_size, local_rank: rank, host, port, launcher }
}

fn join_as(ranks: &Ranks, limit: Duration) -> Result<Joined, CommError> {
    join(ranks, LIBRARY, || Ok(vec![7; 128]), limit)
}

/// Runs `body` as each of `n` ranks.
fn on_ranks<R: Send>(n: usize, body: impl Fn(Ranks) -> R + Sync) -> Vec<R> {
    let port = free_port();
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = (0..n).map(|rank| scope.spawn(move || body(ranks(rank, n, port)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn refusal(result: Result<Joined, CommError>) -> RendezvousError {
    match result {
        Err(CommError::Rendezvous(error)) => error,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("they met"),
    }
}

#[test]
fn ranks_that_come_in_time_get_what_rank_0_made() {
    for joined in on_ranks(5, |ranks| {
        // The later the rank, the earlier it comes: rank 0 is last.
        std::thread::sleep(Duration::from_millis(40 * (5 - ranks.rank) as u64));
        join_as(&ranks, LONG).map(|joined| joined.id)
    }) {
        assert_eq!(joined.unwrap(), [7; 128]);
    }
}

#[test]
fn a_rank_that_was_told_of_another_world_ends_the_rendezvous_for_all() {
    let port = free_port();
    let limit = Duration::from_secs(5);
    let refusals = std::thread::scope(|scope| {
        let first = scope.spawn(move || refusal(join_as(&ranks(0, 3, port), limit)));
        let right = scope.spawn(move || refusal(join_as(&ranks(1, 3, port), limit)));
        let wrong = scope.spawn(move || refusal(join_as(&ranks(2, 4, port), limit)));
        [first, right, wrong].map(|thread| thread.join().unwrap())
    });
    // Who comes after the end looks for rank 0 until the limit.
    let expected = RendezvousError::WorldSize { rank: 2, says: 4, expected: 3 };
    assert_eq!(refusals[0], expected);
    assert!(refusals.iter().filter(|r| **r == expected).count() >= 2, "{refusals:?}");
}

#[test]
fn other_versions_and_two_of_a_rank_are_refused() {
    let hello = |rank, version, library| Message::Hello { version, rank, world_size: 2, library };
    let cases = [
        (hello(1, VERSION + 1, LIBRARY), RendezvousError::Version { rank: 1, says: VERSION + 1, expected: VERSION }),
        (hello(1, VERSION, 22_809), RendezvousError::Library { rank: 1, says: 22_809, expected: LIBRARY }),
        (hello(0, VERSION, LIBRARY), RendezvousError::Twice { rank: 0 }),
        (hello(2, VERSION, LIBRARY), RendezvousError::WorldSize { rank: 2, says: 2, expected: 2 }),
    ];
    for (hello, expected) in cases {
        let port = free_port();
        let first = std::thread::spawn(move || refusal(join_as(&ranks(0, 2, port), LONG)));
        let stream = patiently(port);
        // So that rank 0 itself has said hello before.
        std::thread::sleep(Duration::from_millis(50));
        send(&stream, &[hello]).unwrap();
        let answer = Incoming::new(stream).next(LONG).unwrap();
        assert_eq!(answer, Some(Message::Refused { error: expected.clone() }));
        assert_eq!(first.join().unwrap(), expected);
    }
}

/// A connection to `port`, where somebody will listen soon.
fn patiently(port: u16) -> TcpStream {
    let begun = Instant::now();
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn strangers_at_the_port_are_ignored() {
    let met = on_ranks(2, |ranks| {
        if ranks.rank == 1 {
            let mut stranger = patiently(ranks.port);
            stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            let silent = patiently(ranks.port);
            let joined = join_as(&ranks, LONG);
            drop((stranger, silent));
            return joined.is_ok();
        }
        join_as(&ranks, LONG).is_ok()
    });
    assert_eq!(met, [true, true]);
}

#[test]
fn who_is_missing_is_named_within_the_limit() {
    let port = free_port();
    let begun = Instant::now();
    let refusals = std::thread::scope(|scope| {
        let came = [0, 2].map(|rank| scope.spawn(move || refusal(join_as(&ranks(rank, 4, port), SHORT))));
        came.map(|thread| thread.join().unwrap())
    });
    let expected = RendezvousError::Missing { ranks: vec![1, 3], world_size: 4, limit: SHORT };
    assert_eq!(refusals, [expected.clone(), expected]);
    assert!(begun.elapsed() < SHORT + Duration::from_secs(5));
}

#[test]
fn a_rank_that_dies_before_all_have_come_is_named() {
    let port = free_port();
    let first = std::thread::spawn(move || refusal(join_as(&ranks(0, 3, port), LONG)));
    let stream = patiently(port);
    send(&stream, &[Message::Hello { version: VERSION, rank: 2, world_size: 3, library: LIBRARY }]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    drop(stream);
    assert_eq!(first.join().unwrap(), RendezvousError::Died { rank: 2 });
}

#[test]
fn an_address_in_use_and_one_where_nobody_listens_are_errors() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let address = format!("127.0.0.1:{port}");
    let refused = refusal(join_as(&ranks(0, 2, port), SHORT));
    assert_eq!(refused, RendezvousError::AddressInUse { address: address.clone() });
    assert!(refused.to_string().contains("MASTER_PORT"));
    drop(taken);
    let refused = refusal(join_as(&ranks(1, 2, port), SHORT));
    assert!(
        matches!(&refused, RendezvousError::Unreachable { rank: 1, address: a, .. } if *a == address),
        "{refused}"
    );
    let nowhere = Ranks { host: "no-such-host.invalid".to_owned(), ..ranks(1, 2, port) };
    assert!(matches!(refusal(join_as(&nowhere, SHORT)), RendezvousError::Unreachable { .. }));
    let not_here = Ranks { host: "no-such-host.invalid".to_owned(), ..ranks(0, 2, port) };
    assert!(matches!(refusal(join_as(&not_here, SHORT)), RendezvousError::Listen { .. }));
}

/// A communicator that only knows whether it was aborted.
#[derive(Default)]
struct Fake {
    aborts: AtomicUsize,
    error: Mutex<Option<String>>,
}

impl Transport for Fake {
    fn error(&self) -> Option<String> {
        self.error.lock().clone()
    }

    fn abort(&self) -> AbortCompletion {
        self.aborts.fetch_add(1, Ordering::Relaxed);
        AbortCompletion::new().1
    }
}

/// A communicator whose collective stands behind one of another's on a stream: it ends when that one does.
struct Behind(Arc<Fake>);

impl Transport for Behind {
    fn error(&self) -> Option<String> {
        None
    }

    fn abort(&self) -> AbortCompletion {
        let (ended, end) = AbortCompletion::new();
        let other = Arc::clone(&self.0);
        std::thread::spawn(move || {
            while other.aborts.load(Ordering::Relaxed) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(ended);
        });
        end
    }
}

fn call(collective: Collective, len: usize) -> Call {
    let segments = Segments::Balanced(len);
    Call { collective, op: None, dtype: DType::F32, segments, root: None, control: false }
}

fn broadcast(len: usize) -> Call {
    call(Collective::Broadcast, len)
}

/// A rank whose collectives are flags.
struct Rank {
    world: World,
    fake: Arc<Fake>,
    poisoned: Arc<Mutex<Vec<String>>>,
}

impl Rank {
    fn start(ranks: &Ranks, limit: Duration) -> Self {
        let world = World::start(join_as(ranks, LONG).unwrap(), ranks.rank, limit).unwrap();
        let fake = Arc::new(Fake::default());
        world.open(0, Arc::clone(&fake) as Arc<dyn Transport>);
        Self { world, fake, poisoned: Arc::default() }
    }

    /// Calls a collective whose stream has reached it if `reached`, and which ends when the flag is set.
    fn call(&self, call: Call, reached: bool, ended: &Arc<AtomicBool>) {
        let (ended, poisoned) = (Arc::clone(ended), Arc::clone(&self.poisoned));
        self.world.called(0, call.clone());
        self.world.watch(
            0,
            Operation {
                call,
                stream: "comm".to_owned(),
                reached: Box::new(move || Ok(reached)),
                ended: Box::new(move || Ok(ended.load(Ordering::Relaxed))),
                poison: Box::new(move |error| poisoned.lock().push(error.to_string())),
            },
        );
    }

    /// Waits for the world's failure, and for what it does to this rank.
    fn ends(&self) -> CommError {
        let begun = Instant::now();
        while self.fake.aborts.load(Ordering::Relaxed) == 0 {
            assert!(begun.elapsed() < LONG, "no failure came");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.world.failure().unwrap()
    }
}

#[test]
fn communicators_whose_collectives_stand_behind_one_another_are_aborted_at_once() {
    for failed in on_ranks(1, |ranks| {
        let world = World::start(join_as(&ranks, LONG).unwrap(), 0, LONG).unwrap();
        let last = Arc::new(Fake::default());
        world.open(0, Arc::new(Behind(Arc::clone(&last))));
        world.open(1, last);
        let begun = Instant::now();
        world.fail(CommError::Aborted { rank: 0, reason: "on purpose".to_owned() });
        // It ends when both have.
        drop(world);
        begun.elapsed()
    }) {
        assert!(failed < Duration::from_secs(3), "{failed:?}");
    }
}

fn flag(value: bool) -> Arc<AtomicBool> {
    Arc::new(AtomicBool::new(value))
}

#[test]
fn ranks_that_do_the_same_part_without_a_failure() {
    let failures = on_ranks(3, |ranks| {
        let rank = Rank::start(&ranks, LONG);
        for i in 0..200 {
            rank.call(broadcast(i), true, &flag(true));
        }
        while rank.world.under_way(0) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Rank 0 ends first, and the hub with it; the last one much later.
        std::thread::sleep(Duration::from_millis(60 * ranks.rank as u64));
        rank.world.close(0, 200);
        rank.world.failure()
    });
    assert_eq!(failures, [None, None, None]);
}

#[test]
fn different_calls_of_one_number_end_all_ranks_with_both() {
    let others =
        [call(Collective::Broadcast, 7), call(Collective::AllReduce, 8), Call { dtype: DType::U8, ..broadcast(8) }];
    for other in others {
        let errors = on_ranks(3, |ranks| {
            let rank = Rank::start(&ranks, LONG);
            rank.call(broadcast(1), true, &flag(true));
            rank.call(if ranks.rank == 1 { other.clone() } else { broadcast(8) }, true, &flag(false));
            let error = rank.ends();
            assert_eq!(rank.poisoned.lock()[..], [error.to_string()]);
            error
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        let CommError::Mismatch { sequence: 1, rank, call, other_rank, other_call } = &errors[0] else {
            panic!("{}", errors[0])
        };
        assert!((*rank == 1) != (*other_rank == 1));
        let of_one = if *rank == 1 { call } else { other_call };
        assert_eq!(**of_one, other);
    }
}

#[test]
fn a_rank_that_does_not_call_or_whose_stream_does_not_come_is_named() {
    for calls in [false, true] {
        let errors = on_ranks(3, |ranks| {
            let rank = Rank::start(&ranks, SHORT);
            rank.call(broadcast(1), true, &flag(true));
            let late = ranks.rank == 2;
            if calls || !late {
                rank.call(broadcast(8), !late, &flag(false));
            }
            rank.ends()
        });
        let call = Box::new(broadcast(8));
        assert_eq!(errors, vec![CommError::Stalled { sequence: 1, call, rank: 2, limit: SHORT, done: 1 }; 3]);
    }
}

#[test]
fn a_collective_that_all_are_in_and_that_does_not_end_is_an_error() {
    let errors = on_ranks(2, |ranks| {
        let rank = Rank::start(&ranks, SHORT);
        rank.call(broadcast(8), true, &flag(false));
        rank.ends()
    });
    assert_eq!(errors[0], errors[1]);
    let text = errors[0].to_string();
    assert!(text.contains("collective 0, broadcast") && text.contains("all ranks are in it"), "{text}");
}

#[test]
fn compute_before_a_collective_does_not_count_as_waiting() {
    let failures = on_ranks(2, |ranks| {
        let rank = Rank::start(&ranks, SHORT);
        rank.call(broadcast(8), false, &flag(false));
        std::thread::sleep(SHORT * 2);
        rank.world.failure()
    });
    assert_eq!(failures, [None, None]);
}

#[test]
fn a_rank_whose_connection_ends_is_named_with_the_collective() {
    for during in [false, true] {
        let errors = on_ranks(3, |ranks| {
            if ranks.rank == 1 {
                let joined = join_as(&ranks, LONG).unwrap();
                let calls = vec![Message::Called { context: 0, call: broadcast(1) }; if during { 2 } else { 1 }];
                send(&joined.outgoing, &calls).unwrap();
                send(&joined.outgoing, &[Message::Progress { context: 0, reached: 1, ended: 1 }]).unwrap();
                // The others are waiting by then.
                std::thread::sleep(Duration::from_millis(100));
                joined.outgoing.shutdown(Shutdown::Both).unwrap();
                return None;
            }
            let rank = Rank::start(&ranks, LONG);
            rank.call(broadcast(1), true, &flag(true));
            rank.call(broadcast(1), true, &flag(false));
            Some(rank.ends())
        });
        let (call, done) = (Box::new(broadcast(1)), if during { 2 } else { 1 });
        let left = Some(CommError::Left { sequence: 1, call, rank: 1, done });
        assert_eq!(errors, [left.clone(), None, left]);
    }
}

#[test]
fn the_end_of_rank_0_ends_the_others() {
    let errors = on_ranks(2, |ranks| {
        if ranks.rank == 0 {
            // The hub dies with rank 0's process: here it is one that says nothing but hello, and ends.
            let listener = TcpListener::bind(("127.0.0.1", ranks.port)).unwrap();
            let (stream, _) = listener.accept().unwrap();
            Incoming::new(stream.try_clone().unwrap()).next(LONG).unwrap().unwrap();
            send(&stream, &[Message::Welcome { id: vec![1] }]).unwrap();
            std::thread::sleep(Duration::from_millis(50));
            return None;
        }
        Some(Rank::start(&ranks, LONG).ends())
    });
    assert!(matches!(errors[1], Some(CommError::Peer { rank: 0, .. })), "{errors:?}");
}

#[test]
fn a_rank_that_gives_up_while_others_call_is_named() {
    for before in [false, true] {
        let errors = on_ranks(3, |ranks| {
            let rank = Rank::start(&ranks, LONG);
            rank.call(broadcast(1), true, &flag(true));
            if ranks.rank == 1 {
                std::thread::sleep(Duration::from_millis(if before { 0 } else { 100 }));
                rank.world.close(0, 1);
                return None;
            }
            std::thread::sleep(Duration::from_millis(if before { 100 } else { 0 }));
            rank.call(broadcast(8), true, &flag(false));
            Some(rank.ends())
        });
        let left = Some(CommError::Left { sequence: 1, call: Box::new(broadcast(8)), rank: 1, done: 1 });
        assert_eq!(errors, [left.clone(), None, left]);
    }
}

#[test]
fn an_abort_an_error_of_the_library_and_a_stream_that_fails_reach_all() {
    for how in ["abort", "library", "stream"] {
        let errors = on_ranks(3, |ranks| {
            let rank = Rank::start(&ranks, LONG);
            let at_fault = ranks.rank == 1;
            match how {
                "abort" if at_fault => {
                    let error = CommError::Aborted { rank: 1, reason: "on purpose".to_owned() };
                    assert_eq!(rank.world.fail(error.clone()), error);
                    // The first failure stands.
                    let second = CommError::Aborted { rank: 1, reason: "again".to_owned() };
                    assert_eq!(rank.world.fail(second), error);
                }
                "library" if at_fault => *rank.fake.error.lock() = Some("unhandled system error".to_owned()),
                "stream" if at_fault => {
                    rank.world.called(0, broadcast(8));
                    let failed = || Err(DeviceError::Closed { stream: "comm".to_owned() });
                    rank.world.watch(
                        0,
                        Operation {
                            call: broadcast(8),
                            stream: "comm".to_owned(),
                            reached: Box::new(failed),
                            ended: Box::new(failed),
                            poison: Box::new(|_| ()),
                        },
                    );
                }
                _ => rank.call(broadcast(8), true, &flag(false)),
            }
            rank.ends()
        });
        let expected = match how {
            "abort" => CommError::Aborted { rank: 1, reason: "on purpose".to_owned() },
            "library" => CommError::Peer { rank: 1, message: "unhandled system error".to_owned() },
            _ => {
                let (call, stream) = (Box::new(broadcast(8)), "comm".to_owned());
                CommError::Skipped { sequence: 0, call, rank: 1, stream }
            }
        };
        assert_eq!(errors, vec![expected; 3], "{how}");
    }
}

#[test]
fn a_split_gives_every_rank_the_requests_of_all() {
    let request =
        |rank: usize| SplitRequest { color: (rank != 2).then_some(rank as u64 % 2 + 5), key: 10 - rank as u64 };
    let answers = on_ranks(4, |ranks| {
        let rank = Rank::start(&ranks, LONG);
        let first = rank.world.split(0, 0, request(ranks.rank)).unwrap();
        // A second one gets numbers of its own.
        let second = rank.world.split(0, 1, SplitRequest { color: Some(1), key: 0 }).unwrap();
        rank.world.close(0, 0);
        (first, second.0)
    });
    let requests: Vec<_> = (0..4).map(request).collect();
    assert_eq!(answers, vec![((1, requests), 3); 4]);
}

#[test]
fn a_registration_gives_every_rank_the_bytes_of_all() {
    let bytes = |rank: usize| (rank != 1).then_some(rank as u64 + 7);
    let answers = on_ranks(3, |ranks| {
        let rank = Rank::start(&ranks, LONG);
        let first = rank.world.register(0, 0, bytes(ranks.rank)).unwrap();
        // Splits and registrations are counted together.
        let (context, _) = rank.world.split(0, 1, SplitRequest { color: Some(1), key: 0 }).unwrap();
        rank.world.close(0, 0);
        (first, context)
    });
    assert_eq!(answers, vec![((0..3).map(bytes).collect(), 1); 3]);
}

#[test]
fn a_rank_that_splits_where_another_registers_ends_all_and_both_are_named() {
    for early in [0, 1] {
        let errors = on_ranks(2, |ranks| {
            let rank = Rank::start(&ranks, LONG);
            std::thread::sleep(Duration::from_millis(if ranks.rank == early { 0 } else { 100 }));
            match ranks.rank {
                0 => rank.world.register(0, 0, Some(1)).map(drop).unwrap_err(),
                _ => rank.world.split(0, 0, SplitRequest { color: None, key: 1 }).map(drop).unwrap_err(),
            }
        });
        assert_eq!(errors[0], errors[1]);
        let text = errors[0].to_string();
        let words = ["rank 0", "rank 1", "split", "registration", "communicator 0"];
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

#[test]
fn a_registration_that_a_rank_does_not_come_to_says_so() {
    let errors = on_ranks(2, |ranks| {
        let rank = Rank::start(&ranks, SHORT);
        if ranks.rank == 0 { rank.world.register(0, 0, Some(1)).map(drop).unwrap_err() } else { rank.ends() }
    });
    for error in errors {
        let CommError::Peer { rank: 1, message } = &error else { panic!("{error}") };
        assert!(message.contains("did not come to registration 0 of communicator 0"), "{message}");
    }
}

#[test]
fn a_split_that_a_rank_does_not_come_to_ends_all() {
    for how in ["stalls", "leaves", "dies"] {
        let errors = on_ranks(3, |ranks| {
            if ranks.rank == 1 && how == "dies" {
                let joined = join_as(&ranks, LONG).unwrap();
                std::thread::sleep(Duration::from_millis(100));
                joined.outgoing.shutdown(Shutdown::Both).unwrap();
                return None;
            }
            let rank = Rank::start(&ranks, if how == "stalls" { SHORT } else { LONG });
            if ranks.rank != 1 {
                let begun = Instant::now();
                let error = rank.world.split(0, 0, SplitRequest { color: Some(0), key: 0 }).unwrap_err();
                assert!(begun.elapsed() < LONG / 2, "{how}: {:?}", begun.elapsed());
                return Some(error);
            }
            if how == "leaves" {
                rank.world.close(0, 0);
                return None;
            }
            Some(rank.ends())
        });
        for (rank, error) in errors.iter().enumerate() {
            match error {
                Some(CommError::Peer { rank: 1, message }) => {
                    assert!(how == "dies" || message.contains("split 0"), "{how}: {message}");
                }
                None if rank == 1 && how != "stalls" => {}
                _ => panic!("{how}: rank {rank}: {error:?}"),
            }
        }
    }
}
