//! Times saving and loading against `dd` and the peers, interleaved in one run.
//!
//! ```text
//! cargo run -p benches --release --bin ckpt_speed -- [DIR] [GIB] [ROUNDS]
//! ```
//!
//! Each round, in turn: `dd oflag=direct conv=fsync`; a save (synced and published);
//! `dd iflag=direct`; a verified load that bypasses the page cache; if
//! `python3 benches/peers/ckpt.py` works, safetensors `save_file` with fsync and torch DCP; a
//! memcpy, and the stall of a background save of the same bytes. Disk speed varies several-fold
//! between runs, so only ratios within a run are comparable. The output has their medians.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use zero_ckpt::{
    BackgroundStore, Reader, SaveMeta, ShardData, SingleRank, StateDtype, StateSpec, Store,
    StoreOptions,
};
use zero_shard::{Layout, ParamSpec, UnitSpec};

const STATES: [&str; 3] = ["master", "first_moment", "second_moment"];

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let dir = args
        .get(1)
        .map_or_else(|| std::env::temp_dir().join("zero-ckpt-speed"), Into::into);
    let gib: f64 = args.get(2).map_or(Ok(1.0), |a| a.parse())?;
    let rounds: usize = args.get(3).map_or(Ok(5), |a| a.parse())?;
    std::fs::create_dir_all(&dir)?;

    let elems = ((gib * (1u64 << 30) as f64) as u64) / 12 / 12;
    let units: Vec<_> = (0..12)
        .map(|i| {
            UnitSpec::new(
                format!("h.{i}"),
                [ParamSpec::new(format!("h.{i}.w"), [elems])],
            )
        })
        .collect();

    let layout = Arc::new(Layout::new(&units, 1, 64)?);
    let states = STATES.map(|s| noise(layout.shard_elems() as usize, s.len() as u32));
    let bytes = layout.numel_elems() * 12;
    println!(
        "{:.2} GiB, {rounds} rounds, {}",
        bytes as f64 / (1u64 << 30) as f64,
        dir.display()
    );
    // dd reads from memory, like the save.
    let source = Path::new("/dev/shm/zero-ckpt-dd-source");
    let mut file = std::fs::File::create(source)?;
    states
        .iter()
        .try_for_each(|s| file.write_all(bytes_of(s)))?;
    let mut peers = peers(&dir, gib, rounds).ok();

    let mut table: Vec<(&str, Vec<f64>)> = Vec::new();
    let mut note =
        |name: &'static str, seconds: f64| match table.iter_mut().find(|(n, _)| *n == name) {
            Some((_, all)) => all.push(seconds),
            None => table.push((name, vec![seconds])),
        };

    for round in 0..rounds {
        let target = dir.join("dd.out");
        let from = format!("if={}", source.display());
        let to = format!("of={}", target.display());
        note(
            "dd write",
            timed(|| run("dd", &[&from, &to, "bs=4M", "oflag=direct", "conv=fsync"]))?,
        );
        let store_dir = dir.join("store");
        let _ = std::fs::remove_dir_all(&store_dir);
        let store = Store::create(&store_dir, 0, StoreOptions::default())?;
        let meta = |step| SaveMeta::default().step(step);
        let shard = shard(&layout, &states)?;
        note(
            "save",
            timed(|| store.save(&meta(1), &shard, &mut SingleRank))?,
        );

        let from = format!("if={}", target.display());
        note(
            "dd read",
            timed(|| run("dd", &[&from, "of=/dev/null", "bs=4M", "iflag=direct"]))?,
        );
        let mut loaded = vec![1.0f32; layout.shard_elems() as usize];
        let reader = Reader::open(&store_dir)?;
        let view = reader.view(&layout)?;
        note(
            "load",
            timed(|| {
                STATES
                    .iter()
                    .try_for_each(|s| view.read_storage(s, 0, &mut loaded))
            })?,
        );
        std::fs::remove_file(target)?;

        if let Some(peers) = &mut peers {
            let line = peer_round(peers)?;
            for (name, key) in [
                ("safetensors", "\"safetensors_s\": "),
                ("torch DCP", "\"dcp_s\": "),
            ] {
                let number = line
                    .split(key)
                    .nth(1)
                    .and_then(|r| r.split([',', '}']).next()?.parse().ok());
                number.into_iter().for_each(|s| note(name, s));
            }
        }

        let specs = STATES
            .map(|state| StateSpec::new(state, StateDtype::F32))
            .to_vec();
        let mut background = BackgroundStore::new(store, Arc::clone(&layout), specs, 1)?;
        let mut copy: Vec<Vec<f32>> = states.iter().map(|s| vec![1.0; s.len()]).collect();
        let memcpy = || {
            copy.iter_mut()
                .zip(&states)
                .for_each(|(to, from)| to.copy_from_slice(from));
            Ok::<_, String>(())
        };
        note("memcpy", timed(memcpy)?);
        note(
            "stall of a background save",
            timed(|| background.begin_copy(meta(2), &shard))?,
        );
        background.complete(&mut SingleRank)?;
        drop(background);
        let _ = std::fs::remove_dir_all(store_dir);
        eprintln!("round {} of {rounds}", round + 1);
    }

    drop(peers.map(|mut p| p.wait()));
    std::fs::remove_file(source)?;
    report(&table, bytes);
    Ok(())
}

fn report(table: &[(&str, Vec<f64>)], bytes: u64) {
    for (name, seconds) in table {
        let rate = bytes as f64 / median(seconds) / 1e9;
        println!(
            "{name:<28} median {:>7.3} s  {rate:>6.2} GB/s",
            median(seconds)
        );
    }

    let of = |name: &str| table.iter().find(|(n, _)| *n == name).map(|(_, s)| s);
    let pairs = [
        ("save against dd", "dd write", "save", "at least 0.9"),
        (
            "save against safetensors + fsync",
            "safetensors",
            "save",
            "at least 1.3",
        ),
        ("save against torch DCP", "torch DCP", "save", "at least 2"),
        (
            "dd itself against torch DCP",
            "torch DCP",
            "dd write",
            "limit of the disk",
        ),
        ("load against dd", "dd read", "load", "at least 0.9"),
        (
            "stall against memcpy",
            "stall of a background save",
            "memcpy",
            "at most 1.3",
        ),
    ];

    for (name, above, below, goal) in pairs {
        let (Some(above), Some(below)) = (of(above), of(below)) else {
            continue;
        };
        let ratios: Vec<f64> = above.iter().zip(below).map(|(a, b)| a / b).collect();
        println!(
            "{name:<34} {:.2} ({goal}; rounds: {ratios:.2?})",
            median(&ratios)
        );
    }
}

fn shard<'a>(
    layout: &'a Layout,
    states: &'a [Vec<f32>; 3],
) -> Result<ShardData<'a>, Box<dyn Error>> {
    let mut shard = ShardData::new(layout, 0)?;
    for (name, values) in STATES.iter().zip(states) {
        shard.storage_f32(name, values)?;
    }
    Ok(shard)
}

fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        x as f32
    };
    (0..len).map(|_| next()).collect()
}

fn bytes_of(values: &[f32]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Runs `work` and returns its seconds.
fn timed<T, E: Into<Box<dyn Error>>>(
    work: impl FnOnce() -> Result<T, E>,
) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    work().map_err(Into::into)?;
    Ok(start.elapsed().as_secs_f64())
}

fn run(program: &str, args: &[&str]) -> Result<(), Box<dyn Error>> {
    let out = Command::new(program).args(args).output()?;
    if out.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&out.stderr).into())
    }
}

fn peers(dir: &Path, gib: f64, rounds: usize) -> Result<Child, Box<dyn Error>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers/ckpt.py");
    let mut python = Command::new("python3");
    python
        .arg(script)
        .arg(dir)
        .args([gib.to_string(), rounds.to_string()]);
    Ok(python
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?)
}

/// Starts a round of the peers and returns their output line.
fn peer_round(peers: &mut Child) -> Result<String, Box<dyn Error>> {
    let mut line = String::new();
    peers.stdin.as_mut().ok_or("no stdin")?.write_all(b"go\n")?;
    BufReader::new(peers.stdout.as_mut().ok_or("no stdout")?).read_line(&mut line)?;
    Ok(line)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}
