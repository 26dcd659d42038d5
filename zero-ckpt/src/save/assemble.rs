//! A checkpoint of the staged files that a failed save has left, in one or several directories.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::Path;

use zero_shard::Layout;

use super::agreement::{PublishedCheckpoint, StagedFile};
use super::description::Description;
use super::meta::shard_name;
use super::publish::Place;
use super::staged_name::{Kind, SaveId, StagedName};
use super::store::encode_header;
use crate::format::blocks::{FileLayout, checksum, shard_pieces};
use crate::format::catalog::{STAGING, step_name};
use crate::format::manifest::{FileRecord, Manifest};
use crate::io::dir::Dir;
use crate::load::shard_file::ShardFile;
use crate::{CkptError, Store, StoreOptions};

/// Missing ranks that an error lists.
const MAX_LISTED: usize = 8;

/// The result of [`assemble`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Assembled {
    /// The checkpoint.
    pub checkpoint: PublishedCheckpoint,
    /// The defects of staged saves of later steps.
    pub passed_over: Vec<String>,
}

/// Makes a checkpoint in the directory `into` of files that a failed save has staged, as the save would have: the shard
/// files are the same bytes, and the manifest differs in nothing. `from` are the directories that ranks saved into, or their
/// `.staging`, or copies of them; `into` is searched too. Of several saves it takes the complete one of the latest step.
///
/// Reads and checks every byte. Files are linked into the checkpoint, or copied from another file system; no staged file is
/// changed or removed.
///
/// # Errors
/// [`CkptError::NotAssembled`] with what is missing, damaged or ambiguous; `into` holds checkpoints of another run or model,
/// or one of the same or a later step ([`CkptError::BadArgument`]); or a failed system call.
pub fn assemble<P: AsRef<Path>>(into: impl AsRef<Path>, from: &[P]) -> Result<Assembled, CkptError> {
    let into = into.as_ref();
    let mut found = Found::default();
    found.search(into)?;
    for path in from {
        found.search(path.as_ref())?;
    }
    let saves: BTreeSet<(u64, SaveId)> = found.descriptions.keys().chain(found.files.keys()).copied().collect();
    let mut reasons = Vec::new();
    let mut complete: Vec<Complete<'_>> = Vec::new();
    for &(step, save) in saves.iter().rev() {
        if complete.first().is_some_and(|complete| complete.step() > step) {
            break;
        }
        match found.complete(step, save) {
            Ok(save) => complete.push(save),
            Err(defects) => reasons.push(format!("{}: {}", save_name(step, save), defects.join(", "))),
        }
    }
    if saves.is_empty() {
        reasons.push("there are no staged files".into());
    }
    if complete.len() > 1 {
        let names: Vec<_> = complete.iter().map(|save| save_name(save.step(), save.save)).collect();
        reasons = vec![format!("several saves are complete, move the others away: {}", names.join(", "))];
        complete.clear();
    }
    let Some(save) = complete.pop() else { return Err(CkptError::NotAssembled { reasons }) };
    let checkpoint = save.publish(into)?;
    Ok(Assembled { checkpoint, passed_over: reasons })
}

/// The name of a save for a user: its step and the ends of its files' names.
fn save_name(step: u64, save: SaveId) -> String {
    let name = StagedName { step, kind: Kind::Description, save }.to_string();
    name.replacen(".save.", ".*.", 1)
}

/// A staged file, in an open directory.
#[derive(Clone)]
struct Location {
    /// Index in [`Found::dirs`].
    dir: usize,
    name: String,
}

/// The entries of all staging directories.
#[derive(Default)]
struct Found {
    dirs: Vec<Dir>,
    descriptions: BTreeMap<(u64, SaveId), Vec<Location>>,
    /// The files of each rank.
    files: BTreeMap<(u64, SaveId), BTreeMap<u64, Vec<Location>>>,
}

impl Found {
    /// Adds the staged files of `path` and of its `.staging`. A directory that does not exist has none.
    fn search(&mut self, path: &Path) -> Result<(), CkptError> {
        let dir = match Dir::open(path) {
            Err(CkptError::Io { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            other => other?,
        };
        if dir.has(STAGING) {
            self.add(dir.open_dir(STAGING)?)?;
        }
        self.add(dir)
    }

    fn add(&mut self, dir: Dir) -> Result<(), CkptError> {
        let index = self.dirs.len();
        let mut moved = Vec::new();
        for name in dir.names()? {
            let Some(StagedName { step, kind, save }) = StagedName::parse(&name) else { continue };
            match kind {
                Kind::File(rank) => self.add_file((step, save), rank, Location { dir: index, name }),
                Kind::Description => {
                    self.descriptions.entry((step, save)).or_default().push(Location { dir: index, name });
                }
                Kind::Ready => moved.push(((step, save), dir.open_dir(&name)?)),
            }
        }
        self.dirs.push(dir);
        for (key, dir) in moved {
            let index = self.dirs.len();
            for name in dir.names()? {
                if let Some(rank) = rank_of(&name) {
                    self.add_file(key, rank, Location { dir: index, name });
                }
            }
            self.dirs.push(dir);
        }
        Ok(())
    }

    fn add_file(&mut self, save: (u64, SaveId), rank: u64, location: Location) {
        self.files.entry(save).or_default().entry(rank).or_default().push(location);
    }

    /// Checks every byte of a save; returns what is missing, damaged or ambiguous.
    fn complete(&self, step: u64, save: SaveId) -> Result<Complete<'_>, Vec<String>> {
        let description = self.description(step, save).map_err(|error| vec![error])?;
        let manifest = &description.manifest;
        let layout = Layout::new(&manifest.model.units, manifest.layout.world_size, manifest.layout.align_elems)
            .map_err(|e| vec![format!("its description has an invalid layout: {e}")])?;
        let none = BTreeMap::new();
        let files = self.files.get(&(step, save)).unwrap_or(&none);
        let ranks = 0..layout.world_size();
        let missing: Vec<String> =
            ranks.clone().filter(|rank| !files.contains_key(rank)).map(|rank| rank.to_string()).collect();
        if !missing.is_empty() {
            let listed = missing[..missing.len().min(MAX_LISTED)].join(", ");
            let more = missing.len().saturating_sub(MAX_LISTED);
            let more = if more > 0 { format!(" and {more} others") } else { String::new() };
            return Err(vec![format!(
                "the files of {} of {} ranks are missing: {listed}{more}",
                missing.len(),
                ranks.end
            )]);
        }
        let mut probe = manifest.clone();
        let mut staged = Vec::new();
        let mut dirs = Vec::new();
        let mut defects = Vec::new();
        for (rank, locations) in files.range(ranks) {
            match self.whole(&mut probe, &layout, (*rank, save), locations) {
                Ok((file, dir)) => {
                    staged.push(file);
                    dirs.push(dir);
                }
                Err(error) => defects.push(error),
            }
        }
        if defects.is_empty() { Ok(Complete { description, save, staged, dirs }) } else { Err(defects) }
    }

    fn description(&self, step: u64, save: SaveId) -> Result<Description, String> {
        let locations = self.descriptions.get(&(step, save)).map(Vec::as_slice).unwrap_or_default();
        let missing = "its description, which rank 0 writes beside its file, is missing".to_owned();
        let mut result = Err(missing);
        for Location { dir, name } in locations {
            result = Description::read(&self.dirs[*dir], name, step).map_err(|error| error.to_string());
            if result.is_ok() {
                break;
            }
        }
        result
    }

    /// The whole one among copies of a rank's file. Copies that differ are an error.
    fn whole(
        &self,
        probe: &mut Manifest,
        layout: &Layout,
        (rank, save): (u64, SaveId),
        locations: &[Location],
    ) -> Result<(StagedFile, &Dir), String> {
        let mut whole: Option<(StagedFile, &Dir)> = None;
        let mut defect = None;
        for Location { dir, name } in locations {
            let dir = &self.dirs[*dir];
            match read_whole(dir, name, probe, layout, rank, save) {
                Ok(file) => match &whole {
                    Some((other, _)) if other.front_crc64 != file.front_crc64 => {
                        let path = dir.path().join(name);
                        return Err(format!("{} is another file of rank {rank}; move one away", path.display()));
                    }
                    Some(_) => {}
                    None => whole = Some((file, dir)),
                },
                Err(error) => defect = defect.or(Some(error.to_string())),
            }
        }
        whole.ok_or_else(|| defect.unwrap_or_default())
    }
}

/// The rank in the final name of a shard file.
fn rank_of(name: &str) -> Option<u64> {
    let (rank, world_size) = name.strip_prefix("shard-")?.strip_suffix(".safetensors")?.split_once("-of-")?;
    let rank = rank.parse().ok()?;
    let world_size = world_size.parse().ok()?;
    (shard_name(rank, world_size) == name).then_some(rank)
}

/// Reads and checks every byte of a staged file: its header is the one that the rank writes, and the blocks match the
/// checksums behind it.
fn read_whole(
    dir: &Dir,
    name: &str,
    probe: &mut Manifest,
    layout: &Layout,
    rank: u64,
    save: SaveId,
) -> Result<StagedFile, CkptError> {
    let path = dir.path().join(name);
    let bad = |why: &str| CkptError::BadSafetensors { path: path.clone(), why: why.into() };
    let pieces = shard_pieces(layout, rank)?;
    let file_layout = FileLayout::new(&probe.states, pieces.clone()).ok_or_else(|| bad("sizes exceed 64 bits"))?;
    let header = encode_header(layout, (rank, probe.step), &probe.states, &file_layout)?;
    let front_bytes = header.len() as u64 + file_layout.table_bytes();
    let expected_bytes = front_bytes + file_layout.state_bytes();
    let (file, got_bytes) = dir.open_file(name, false)?;
    if got_bytes != expected_bytes {
        return Err(CkptError::WrongLength { path, expected_bytes, got_bytes });
    }
    let mut front = vec![0; front_bytes as usize];
    file.read_exact_at(&mut front, 0).map_err(CkptError::io("read", &path))?;
    if !front.starts_with(&header) {
        return Err(bad("its header is not that of the save: the file is damaged, unfinished or of another save"));
    }
    let front_crc64 = checksum(&front);
    let record = FileRecord { name: name.to_owned(), bytes: expected_bytes, front_crc64, pieces: pieces.clone() };
    probe.files = vec![record];
    ShardFile::open(dir, probe, 0)?.verify(dir)?;
    let states = probe.states.clone();
    Ok(StagedFile {
        rank,
        step: probe.step,
        file: name.to_owned(),
        bytes: expected_bytes,
        front_crc64,
        states,
        pieces,
        save,
    })
}

/// A save of which all files are whole.
struct Complete<'a> {
    description: Description,
    save: SaveId,
    /// The file of each rank, and its directory.
    staged: Vec<StagedFile>,
    dirs: Vec<&'a Dir>,
}

impl Complete<'_> {
    fn step(&self) -> u64 {
        self.description.manifest.step
    }

    /// Publishes the checkpoint in `into`.
    fn publish(self, into: &Path) -> Result<PublishedCheckpoint, CkptError> {
        let Self { description, staged, dirs, .. } = self;
        let step = description.manifest.step;
        let mut options = StoreOptions::default().resumed_runs(description.resumed_runs.clone());
        options.run = description.manifest.run.clone();
        let store = Store::create(into, 0, options)?;
        store.check_runs()?;
        let newest =
            store.published().iter().map(|entry| entry.name.clone()).filter(|name| *name >= step_name(step)).max();
        if let Some(newest) = newest {
            let expected = format!("one without checkpoints of step {step} or later; name a new directory first");
            return Err(CkptError::argument(into.display().to_string(), expected, newest));
        }
        let documents = description.documents();
        store.publish_manifest(description.manifest, &staged, &documents, description.best, Place::Copy(&dirs))
    }
}
