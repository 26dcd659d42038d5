//! The search for staged saves: which are complete by name, and which of them was staged last.
//!
//! Order comes from names, not from clocks: the description of a save lists the saves that it found
//! in the staging directory, and has the sequence of the newest checkpoint then.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use zero_shard::Layout;

use super::description::Description;
use super::meta::shard_name;
use crate::CkptError;
use crate::format::names::STAGING;
use crate::format::staged_name::{Kind, SaveId, StagedName};
use crate::io::dir::Dir;
use crate::load::catalog;

/// Missing ranks that an error lists.
const MAX_LISTED: usize = 8;

/// The step and the name of a save.
pub(crate) type Key = (u64, SaveId);

/// The name of a save for a user: its step and the ends of its files' names.
pub(crate) fn save_name((step, save): Key) -> String {
    let name = StagedName {
        step,
        kind: Kind::Description,
        save,
    }
    .to_string();
    name.replacen(".save.", ".*.", 1)
}

/// A staged file, in an open directory.
#[derive(Clone)]
pub(crate) struct Location {
    /// Index in [`Found::dirs`].
    pub(crate) dir: usize,
    pub(crate) name: String,
}

/// The entries of all staging directories.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) dirs: Vec<Dir>,
    descriptions: BTreeMap<Key, Vec<Location>>,
    /// The files of each rank.
    files: BTreeMap<Key, BTreeMap<u64, Vec<Location>>>,
    /// Entries with the name of a save that cannot be opened.
    unreadable: BTreeMap<Key, Vec<String>>,
    /// The directory of checkpoints of a staging directory, by the index of the latter.
    roots: BTreeMap<usize, PathBuf>,
}

/// A save with the names of all its files. Their contents are not checked.
pub(crate) struct Described {
    pub(crate) key: Key,
    pub(crate) description: Description,
    pub(crate) layout: Layout,
    /// The files of each rank.
    pub(crate) files: BTreeMap<u64, Vec<Location>>,
}

impl Described {
    /// Whether this save was staged before `other`.
    pub(crate) fn is_before(&self, other: &Self) -> bool {
        let (step, save) = self.key;
        let (_, later) = other.key;
        let name = StagedName {
            step,
            kind: Kind::Description,
            save,
        }
        .to_string();
        (save.session == later.session && save.number < later.number)
            || other.description.staged.contains(&name)
    }

    /// The greatest sequence that a checkpoint has if it was published before this save or by an
    /// earlier one of its session.
    fn last_sequence_before(&self) -> u64 {
        let Description {
            published, staged, ..
        } = &self.description;
        let is_earlier = |name: &&String| {
            StagedName::parse(name)
                .is_some_and(|earlier| earlier.save.session == self.key.1.session)
        };
        published.saturating_add(staged.iter().filter(is_earlier).count() as u64)
    }
}

impl Found {
    /// Adds the staged files of `path` and of its `.staging`. A directory that does not exist has
    /// none.
    pub(crate) fn search(&mut self, path: &Path) -> Result<(), CkptError> {
        let dir = match Dir::open(path) {
            Err(CkptError::Io { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(());
            }
            other => other?,
        };
        if dir.has(STAGING) {
            self.roots.insert(self.dirs.len(), path.to_owned());
            self.add(dir.open_dir(STAGING)?)?;
        }
        if path.file_name().is_some_and(|name| name == STAGING) {
            self.roots.insert(self.dirs.len(), path.join(".."));
        }
        self.add(dir)
    }

    fn add(&mut self, dir: Dir) -> Result<(), CkptError> {
        let index = self.dirs.len();
        let mut moved = Vec::new();
        for name in dir.names()? {
            let Some(StagedName { step, kind, save }) = StagedName::parse(&name) else {
                continue;
            };
            let key = (step, save);
            match kind {
                Kind::File(rank) => self.add_file(key, rank, Location { dir: index, name }),
                Kind::Description => {
                    self.descriptions
                        .entry(key)
                        .or_default()
                        .push(Location { dir: index, name });
                }
                Kind::Ready => match dir.open_dir(&name).and_then(|dir| Ok((dir.names()?, dir))) {
                    Ok((names, dir)) => moved.push((key, names, dir)),
                    Err(error) => self
                        .unreadable
                        .entry(key)
                        .or_default()
                        .push(error.to_string()),
                },
            }
        }

        self.dirs.push(dir);
        for (key, names, dir) in moved {
            let index = self.dirs.len();
            for name in names {
                if let Some(rank) = rank_of(&name) {
                    self.add_file(key, rank, Location { dir: index, name });
                }
            }
            self.dirs.push(dir);
        }

        Ok(())
    }

    fn add_file(&mut self, save: Key, rank: u64, location: Location) {
        self.files
            .entry(save)
            .or_default()
            .entry(rank)
            .or_default()
            .push(location);
    }

    /// All saves, by step.
    pub(crate) fn saves(&self) -> BTreeSet<Key> {
        self.descriptions
            .keys()
            .chain(self.files.keys())
            .chain(self.unreadable.keys())
            .copied()
            .collect()
    }

    /// Finds the files of a save; returns what is missing or cannot be read.
    pub(crate) fn described(&self, key: Key) -> Result<Described, Vec<String>> {
        let mut defects = self.unreadable.get(&key).cloned().unwrap_or_default();
        let described = self.description(key).and_then(|description| {
            let manifest = &description.manifest;
            let layout = Layout::new(
                &manifest.model.units,
                manifest.layout.world_size,
                manifest.layout.align_elems,
            )
            .map_err(|e| format!("its description has an invalid layout: {e}"))?;
            let (files, replaced) = self.files_of(key, &description);
            defects.extend(replaced);
            check_ranks(&files, layout.world_size())?;
            Ok(Described {
                key,
                description,
                layout,
                files,
            })
        });

        described.map_err(|error| {
            defects.insert(0, error);
            defects
        })
    }

    fn description(&self, key: Key) -> Result<Description, String> {
        let locations = self
            .descriptions
            .get(&key)
            .map(Vec::as_slice)
            .unwrap_or_default();
        let missing = "its description, which rank 0 writes beside its file, is missing".to_owned();
        let mut result = Err(missing);
        for Location { dir, name } in locations {
            result =
                Description::read(&self.dirs[*dir], name, key.0).map_err(|error| error.to_string());
            if result.is_ok() {
                break;
            }
        }
        result
    }

    /// The files of a save, without those of directories of another checkpoint; and these
    /// directories.
    fn files_of(
        &self,
        key: Key,
        description: &Description,
    ) -> (BTreeMap<u64, Vec<Location>>, Vec<String>) {
        let mut files = self.files.get(&key).cloned().unwrap_or_default();
        let dirs: BTreeSet<usize> = files
            .values()
            .flatten()
            .map(|location| location.dir)
            .collect();
        let is_other = |dir: &usize| description.is_replaced(&self.dirs[*dir]);
        let others: BTreeSet<usize> = dirs.into_iter().filter(is_other).collect();
        files
            .values_mut()
            .for_each(|locations| locations.retain(|location| !others.contains(&location.dir)));
        files.retain(|_, locations| !locations.is_empty());
        let defect = |dir: usize| {
            format!(
                "{} holds another checkpoint",
                self.dirs[dir].path().display()
            )
        };
        (files, others.into_iter().map(defect).collect())
    }

    /// The newest checkpoint that was published after `save` was staged, in the directory of its
    /// description.
    pub(crate) fn published_after(&self, save: &Described) -> Option<PathBuf> {
        let locations = self.descriptions.get(&save.key)?;
        let roots = locations
            .iter()
            .filter_map(|location| self.roots.get(&location.dir));
        roots.into_iter().find_map(|root| {
            let (published, _) = catalog::list(&Dir::open(root).ok()?).ok()?;
            let newest = published
                .last()
                .filter(|entry| entry.sequence > save.last_sequence_before())?;
            Some(root.join(&newest.name))
        })
    }
}

/// The rank in the final name of a shard file.
fn rank_of(name: &str) -> Option<u64> {
    let (rank, world_size) = name
        .strip_prefix("shard-")?
        .strip_suffix(".safetensors")?
        .split_once("-of-")?;
    let rank = rank.parse().ok()?;
    let world_size = world_size.parse().ok()?;
    (shard_name(rank, world_size) == name).then_some(rank)
}

/// Checks that all ranks have a file. Its cost does not depend on `world_size`, which may be any
/// number.
fn check_ranks(files: &BTreeMap<u64, Vec<Location>>, world_size: u64) -> Result<(), String> {
    let missing = world_size - files.range(0..world_size).count() as u64;
    if missing == 0 {
        return Ok(());
    }
    let listed = (0..world_size)
        .filter(|rank| !files.contains_key(rank))
        .take(MAX_LISTED);
    let listed: Vec<String> = listed.map(|rank| rank.to_string()).collect();
    let more = missing - listed.len() as u64;
    let more = if more > 0 {
        format!(" and {more} others")
    } else {
        String::new()
    };
    Err(format!(
        "the files of {missing} of {world_size} ranks are missing: {}{more}",
        listed.join(", ")
    ))
}

/// The remedy for a save that is staged completely, by the names of its files, and newer than all
/// checkpoints of `path`.
pub(crate) fn newer_staged(path: &Path) -> Option<String> {
    let mut found = Found::default();
    found.search(path).ok()?;
    let described = found
        .saves()
        .into_iter()
        .rev()
        .filter_map(|key| found.described(key).ok());
    let newer = described
        .into_iter()
        .find(|save| found.published_after(save).is_none())?;
    Some(format!(
        "all files of a newer save of step {} are staged: unless a run is saving right now, `zero ckpt assemble {}` makes a \
         checkpoint of them",
        newer.key.0,
        path.display()
    ))
}
