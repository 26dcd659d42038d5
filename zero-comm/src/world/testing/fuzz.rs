//! The fuzz targets: untrusted bytes as frames, as a handshake, as messages to the coordinator.
//! Each function must return for any bytes; it panics if a property is violated. The fuzzer and
//! `tests/suite/corpus.rs` call them.

use std::time::Duration;

use super::{ID, LIBRARY, broadcast};
use crate::split_request::SplitRequest;
use crate::world::coordinator::{Coordinator, Outgoing};
use crate::world::fnv::Fnv;
use crate::world::frames::{MAX_FRAME_BYTES, decode, encode, frame};
use crate::world::handshake::{Hello, Key, MAX_HELLO_BYTES, VERSION};
use crate::world::message::{Message, Progress};
use crate::world::ranks::Token;
use crate::world::wire::Input;
use crate::{CommError, RendezvousError};

/// A fuzz target by its name.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: [Target; 4] = [
    ("frames", frames),
    ("message", message),
    ("handshake", handshake),
    ("coordinator", coordinator),
];

fn key() -> Key {
    Key::new(Token::new("0123456789abcdef").ok().as_ref())
}

/// The frames of `bytes`, which arrive in pieces of at most `piece` bytes, and the error that ends
/// them.
fn cut(
    bytes: &[u8],
    piece: usize,
    max_frame_bytes: usize,
) -> (Vec<Vec<u8>>, Option<std::io::ErrorKind>) {
    let mut frames = Vec::new();
    let mut input = Input::default();
    for mut piece in bytes.chunks(piece) {
        while !piece.is_empty() {
            input.read_from(&mut piece, max_frame_bytes).unwrap();
            loop {
                match input.next_frame(max_frame_bytes) {
                    Ok(Some(frame)) => frames.push(frame.to_vec()),
                    Ok(None) => break,
                    Err(error) => return (frames, Some(error.kind())),
                }
            }
        }
    }
    (frames, None)
}

/// Cuts any bytes into frames; in whatever pieces they arrive, the frames are the same.
pub fn frames(data: &[u8]) {
    let Some((&piece, bytes)) = data.split_first() else {
        return;
    };
    for max_frame_bytes in [MAX_HELLO_BYTES, MAX_FRAME_BYTES] {
        let whole = cut(bytes, usize::MAX, max_frame_bytes);
        assert_eq!(whole, cut(bytes, usize::from(piece) + 1, max_frame_bytes));
        assert!(whole.0.iter().all(|frame| frame.len() <= max_frame_bytes));
        whole.0.iter().for_each(|frame| message(frame));
    }
}

/// Decodes any bytes as a message; what is decoded survives a round trip. It is no longer than
/// before, but for a byte: a message has one duration at most, whose nanoseconds may exceed a
/// second and make its seconds longer.
pub fn message(data: &[u8]) {
    if let Ok(message) = decode::<Message>(data) {
        let again = encode(&message).unwrap();
        assert!(again.len() <= data.len() + 4 + 1, "{message:?}");
        assert_eq!(decode::<Message>(&again[4..]).unwrap(), message);
    }
}

/// Any bytes as frames of the handshake: nobody without the token passes. With a correct MAC, which
/// a fuzzer would not find, nothing panics.
pub fn handshake(data: &[u8]) {
    let key = key();
    assert!(key.check_hello(data).is_none());
    let hello = key.hello(&Hello::new(1, 2, LIBRARY)).unwrap();
    assert!(key.answer(&hello, data).is_none());
    let (_, expected) = key.challenge(&hello).unwrap();
    assert!(!expected.matches(data));
    if let Some(hello) = key.check_hello(&key.sign(data)) {
        let _ = Coordinator::new(2, LIBRARY).join(&hello);
    }
}

/// Any bytes as messages to the coordinator of four ranks. There is at most one failure, answers go
/// to ranks that exist, and each answer can be sent.
pub fn coordinator(mut data: &[u8]) {
    const RANKS: usize = 4;
    let mut coordinator = Coordinator::new(RANKS, LIBRARY);
    for rank in 0..RANKS {
        coordinator.join(&Hello::new(rank, RANKS, LIBRARY)).unwrap();
    }
    let mut failures = 0;

    while let Some((&event, rest)) = data.split_first() {
        data = rest;
        let rank = usize::from(event) % RANKS;
        let outgoing = match event / RANKS as u8 {
            0..16 => {
                let Ok((message, rest)) = postcard::take_from_bytes::<Message>(data) else {
                    return;
                };
                data = rest;
                coordinator.receive(rank, message)
            }
            16..32 => coordinator.tick(),
            _ => coordinator.lost(rank, "lost".to_owned()),
        };
        for outgoing in outgoing {
            let message = match outgoing {
                Outgoing::To(rank, message) => {
                    assert!(rank < RANKS);
                    message
                }
                Outgoing::All(message) => message,
            };
            failures += usize::from(matches!(message, Message::Failed { .. }));
            encode(&message).unwrap();
        }
    }

    assert!(failures <= 1);
}

/// Valid inputs of a target; damaged copies of them get further than random bytes do.
///
/// # Panics
/// The system has no random numbers.
pub fn valid(target: &str) -> Vec<Vec<u8>> {
    let messages = sample_messages();
    let contents = |message: &Message| encode(message).unwrap().split_off(4);
    match target {
        "frames" => {
            let all: Vec<u8> = messages
                .iter()
                .flat_map(|message| encode(message).unwrap())
                .collect();
            vec![
                [&[9], &all[..]].concat(),
                [&[255], &frame(&[1; MAX_HELLO_BYTES]).unwrap()[..]].concat(),
            ]
        }
        "message" => messages.iter().map(contents).collect(),
        // The body of a hello, without its MAC.
        "handshake" => {
            let body = |version| {
                let mut hello = key()
                    .hello(&Hello {
                        version,
                        ..Hello::new(1, 2, LIBRARY)
                    })
                    .unwrap();
                hello.truncate(hello.len() - 16);
                // The nonce: the same in each run.
                hello[24..].fill(3);
                hello
            };
            vec![body(VERSION), body(VERSION + 1)]
        }
        _ => scenarios()
            .iter()
            .map(|events| events.iter().flat_map(event).collect())
            .collect(),
    }
}

fn sample_messages() -> Vec<Message> {
    let call = broadcast(8);
    let limit = Duration::from_secs(1);
    let requests = [
        SplitRequest {
            color: Some(1),
            key: 2,
        },
        SplitRequest {
            color: None,
            key: 0,
        },
    ];

    let errors = [
        CommError::Left {
            sequence: 1,
            call: Box::new(call.clone()),
            rank: 1,
            done: 1,
        },
        CommError::Aborted {
            rank: 1,
            reason: "on purpose".to_owned(),
        },
        CommError::Peer {
            rank: 1,
            message: "failed".to_owned(),
        },
    ];

    let split = |(number, &request): (u64, &_)| Message::Split {
        context: 0,
        number,
        request,
    };

    let mut messages = vec![
        Message::Welcome {
            id: ID.to_vec(),
            report_every: limit,
        },
        Message::Refused {
            error: RendezvousError::Twice { rank: 1 },
        },
        progress(2, 2),
        Message::Late {
            context: 0,
            sequence: 1,
            call,
            limit,
        },
        Message::LateSplit {
            context: 0,
            number: 0,
            limit,
        },
        Message::Left {
            context: 0,
            done: 1,
        },
        Message::Goodbye,
        Message::Alive,
    ];

    messages.extend((0..).zip(&requests).map(split));
    messages.extend(errors.map(|error| Message::Failed { error }));
    messages
}

/// A rank's progress after `called` broadcasts of 8 elements.
fn progress(called: u64, ended: u64) -> Message {
    let mut hash = Fnv::default();
    let hashed = (0..=ended.min(called - 1)).map(|_| {
        hash.add(&broadcast(8));
        (broadcast(8), hash.0)
    });
    let progress = Progress {
        called,
        reached: ended,
        ended,
        recent: hashed.collect(),
    };
    Message::Progress {
        context: 0,
        progress,
    }
}

enum Step {
    From(u8, Message),
    Tick,
    Lost(u8),
}

/// The bytes of an event of the target `coordinator`.
fn event(event: &Step) -> Vec<u8> {
    match event {
        Step::From(rank, message) => [&[*rank], &encode(message).unwrap()[4..]].concat(),
        Step::Tick => vec![64],
        Step::Lost(rank) => vec![128 + rank],
    }
}

/// Sequences of events that reach each part of the coordinator.
fn scenarios() -> Vec<Vec<Step>> {
    use Step::{From, Lost, Tick};
    let equal = || {
        let mut events: Vec<_> = (0..4).map(|rank| From(rank, progress(2, 1))).collect();
        events.push(Tick);
        events
    };

    let with = |more: Vec<Step>| equal().into_iter().chain(more).collect::<Vec<_>>();
    let split = |rank| {
        From(
            rank,
            Message::Split {
                context: 0,
                number: 0,
                request: SplitRequest {
                    color: Some(u64::from(rank) % 2),
                    key: 0,
                },
            },
        )
    };

    let left = |rank, context, done| From(rank, Message::Left { context, done });
    let mut other = progress(2, 2);
    if let Message::Progress { progress, .. } = &mut other {
        progress.recent = vec![(broadcast(9), 7)];
    }

    let late = Message::Late {
        context: 0,
        sequence: 1,
        call: broadcast(8),
        limit: Duration::from_secs(1),
    };

    vec![
        with(
            (0..4)
                .map(|rank| From(rank, Message::Goodbye))
                .chain([Tick])
                .collect(),
        ),
        vec![From(0, progress(2, 2)), From(1, other), Tick],
        vec![From(1, progress(3, 1)), From(0, progress(3, 1)), Tick],
        with(
            (0..4)
                .map(split)
                .chain((0..4).map(|rank| left(rank, 1 + u32::from(rank) % 2, 0)))
                .collect(),
        ),
        with(vec![
            split(0),
            From(
                0,
                Message::LateSplit {
                    context: 0,
                    number: 0,
                    limit: Duration::ZERO,
                },
            ),
        ]),
        with(vec![From(2, late), Tick]),
        with(vec![left(1, 0, 1), Tick]),
        vec![From(1, progress(2, 0)), Lost(0), Tick],
        with(vec![Lost(2), Lost(0), Tick]),
        with(vec![
            From(
                3,
                Message::Failed {
                    error: CommError::Aborted {
                        rank: 3,
                        reason: String::new(),
                    },
                },
            ),
            Tick,
        ]),
    ]
}
