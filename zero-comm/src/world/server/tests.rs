//! Tests of the event loop, one turn at a time.

use std::io::Read;
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use rustix::io::Errno;

use super::super::wire::{Incoming, MAX_OUTPUT_BYTES};
use super::*;

const LIMIT: Duration = Duration::from_secs(60);

fn server(world_size: usize) -> (Server, std::net::SocketAddr) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let key = Key::new(None);
    let options = Options {
        world_size,
        library: 1,
        key,
        id: vec![7],
        join_limit: LIMIT,
        limit: LIMIT,
    };
    (Server::new(listener, options).unwrap(), address)
}

/// Runs the server until `is_done`.
fn turns(server: &mut Server, mut is_done: impl FnMut(&mut Server) -> bool) {
    let mut events = Events::with_capacity(8);
    let begun = Instant::now();
    while !is_done(server) {
        assert!(begun.elapsed() < LIMIT);
        server.next_tick = server
            .next_tick
            .min(Instant::now() + Duration::from_millis(10));
        server.turn(&mut events).unwrap();
    }
}

/// Joins the server as `rank`.
fn join(server: &mut Server, address: std::net::SocketAddr, rank: usize) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    let key = server.options.key.clone();
    let hello = key.hello(&Hello::new(rank, server.peers.len(), 1)).unwrap();
    stream.write_all(&frame(&hello).unwrap()).unwrap();
    turns(server, |server| {
        server
            .strangers
            .values()
            .any(|stranger| stranger.claims.is_some())
    });
    let mut input = Input::default();
    assert!(input.read_from(&mut stream, MAX_HELLO_BYTES).unwrap());
    let challenge = input.next_frame(MAX_HELLO_BYTES).unwrap().unwrap();
    stream
        .write_all(&frame(&key.answer(&hello, challenge).unwrap()).unwrap())
        .unwrap();
    turns(server, |server| server.peers[rank].is_some());
    stream
}

#[test]
fn slow_reader_is_lost() {
    let (mut server, address) = server(2);
    let reader = join(&mut server, address, 0);
    let _slow = join(&mut server, address, 1);
    let frame = encode(&Message::Welcome {
        id: vec![0; MAX_FRAME_BYTES / 2],
        report_every: LIMIT,
    })
    .unwrap();

    while server.lost.is_empty() {
        server.write(1, &frame);
        assert!(server.peers[1].as_ref().unwrap().output.len() <= MAX_OUTPUT_BYTES);
    }

    assert!(
        server.lost[0].1.contains("bytes unread"),
        "{:?}",
        server.lost
    );
    turns(&mut server, |server| server.lost.is_empty());
    assert!(server.peers[1].is_none() && !server.coordinator.is_over());
    // The other rank receives the failure.
    let mut incoming = Incoming::new(reader);
    let failed = std::iter::repeat_with(|| incoming.next(LIMIT).unwrap().unwrap())
        .find(|message| matches!(message, Message::Failed { .. }));
    let Some(Message::Failed {
        error: CommError::Peer { rank: 1, .. },
    }) = failed
    else {
        panic!("{failed:?}")
    };
}

/// A rank that was stopped for too long does not blame another when it runs again.
#[test]
fn lost_rank_is_told_why() {
    let (mut server, address) = server(2);
    let _other = join(&mut server, address, 0);
    let stopped = join(&mut server, address, 1);
    server.peers[1].as_mut().unwrap().silence = TimeLimit::new(Duration::ZERO);
    server.peers[1].as_mut().unwrap().heard = false;
    turns(&mut server, |server| server.peers[1].is_none());
    let mut incoming = Incoming::new(stopped);
    let failed = std::iter::repeat_with(|| incoming.next(LIMIT).unwrap().unwrap())
        .find(|message| matches!(message, Message::Failed { .. }));
    let Some(Message::Failed {
        error: CommError::Peer { rank: 1, .. },
    }) = failed
    else {
        panic!("{failed:?}")
    };
}

#[test]
fn reader_that_stops_is_lost_in_time() {
    let (mut server, address) = server(2);
    let _reader = join(&mut server, address, 0);
    let slow = join(&mut server, address, 1);
    let frame = encode(&Message::Welcome {
        id: vec![0; MAX_FRAME_BYTES / 2],
        report_every: LIMIT,
    })
    .unwrap();
    while server.peers[1].as_ref().unwrap().stalled.is_none() {
        server.write(1, &frame);
    }
    assert!(!server.peers[1].as_ref().unwrap().output.is_empty());
    // It reads again.
    slow.set_nonblocking(true).unwrap();
    let mut slow = slow;
    let mut bytes = vec![0; 1 << 16];
    turns(&mut server, |server| {
        while slow.read(&mut bytes).is_ok_and(|n| n > 0) {}
        server.peers[1].as_ref().unwrap().output.is_empty()
    });
    assert!(server.peers[1].as_ref().unwrap().stalled.is_none() && server.lost.is_empty());
    while server.peers[1].as_ref().unwrap().stalled.is_none() {
        server.write(1, &frame);
    }
    server.peers[1].as_mut().unwrap().stalled = Some(TimeLimit::new(Duration::ZERO));
    turns(&mut server, |server| server.peers[1].is_none());
}

#[test]
fn silent_strangers_make_room() {
    let (mut server, address) = server(1);
    server.places = 3;
    let silent: Vec<_> = (0..9)
        .map(|_| TcpStream::connect(address).unwrap())
        .collect();
    turns(&mut server, |server| server.rejected == 6);
    // Nobody else needs a place.
    let mut more = 20;
    turns(&mut server, |_| {
        more -= 1;
        more == 0
    });
    assert_eq!(
        server.strangers.keys().copied().collect::<Vec<_>>(),
        [8, 9, 10]
    );
    drop(join(&mut server, address, 0));
    // All have joined: there are neither places nor strangers.
    assert!(server.strangers.is_empty() && server.listener.is_none());
    drop(silent);
}

/// Recorded hellos fill all places; their time in a crowd is shorter.
#[test]
fn replayed_hellos_make_room() {
    let (mut server, address) = server(1);
    server.places = 2;
    let hello = frame(&server.options.key.hello(&Hello::new(0, 1, 1)).unwrap()).unwrap();
    let replay = || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&hello).unwrap();
        stream
    };

    let replayed = [replay(), replay()];
    turns(&mut server, |server| {
        server
            .strangers
            .values()
            .filter(|s| s.claims.is_some())
            .count()
            == 2
    });

    let late = replay();
    turns(&mut server, |server| server.rejected > 0);
    // The oldest of two made room for the late one.
    let tokens: Vec<usize> = server.strangers.keys().copied().collect();
    assert_eq!((server.rejected, tokens), (1, vec![3, 4]));
    assert!(server.peers[0].is_none());
    drop((replayed, late));
}

/// ENFILE concerns the whole machine, so a test cannot cause it.
#[test]
fn start_without_descriptors_says_what_to_raise() {
    for (errno, text) in [
        (Errno::MFILE, "`ulimit -n "),
        (Errno::NFILE, "sysctl fs.file-max"),
        (Errno::ADDRINUSE, "in use"),
    ] {
        let error = failed(&errno.into(), 4).to_string();
        assert!(error.contains(text), "{error}");
    }
}
