//! The one pass over staging directories: the saves that are there, the files of each, and which
//! saves are complete by the names of their files.
//!
//! Three read its list: the opening of a directory of checkpoints (see `leftovers`),
//! [`assemble`](crate::assemble), and the hints of [`resolve`](crate::resolve). A publication
//! removes superseded entries by their names alone (see `sweep`).
//!
//! The order of saves comes from names, not from clocks: the description of a save lists the saves
//! that it found in the staging directory, and has the sequence of the newest checkpoint then.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zero_shard::Layout;

use super::description::Description;
use super::meta::shard_name;
use crate::CkptError;
use crate::commands::commands;
use crate::format::names::{STAGING, backup_of};
use crate::format::staged_name::{EntryKind, SaveId};
use crate::io::dir::Dir;
use crate::io::lock::Lock;
use crate::load::catalog;

/// Missing ranks that an error lists.
const MAX_LISTED: usize = 8;

/// An entry of an open directory.
#[derive(Clone)]
pub(crate) struct Location {
    /// Index in [`StagedList::dirs`].
    pub(crate) dir: usize,
    pub(crate) name: String,
}

/// What is in some staging directories.
#[derive(Default)]
pub(crate) struct StagedList {
    pub(crate) dirs: Vec<Arc<Dir>>,
    pub(crate) saves: BTreeMap<SaveId, StagedSave>,
    /// Removed checkpoints whose deletion did not end.
    pub(crate) removed: Vec<String>,
    /// The directory of checkpoints of a staging directory, by the index of the latter.
    roots: BTreeMap<usize, PathBuf>,
}

/// The entries of one save.
#[derive(Default)]
pub(crate) struct StagedSave {
    pub(crate) entries: Vec<Location>,
    descriptions: Vec<Location>,
    /// The files of each rank.
    files: BTreeMap<u64, Vec<Location>>,
    /// The directories into which rank 0 moves the files, as indices in [`StagedList::dirs`].
    ready: Vec<usize>,
    /// The errors of such directories that cannot be opened.
    unreadable: Vec<String>,
}

/// A save with the names of all its files. Their contents are not checked.
pub(crate) struct Described<'a> {
    pub(crate) id: SaveId,
    pub(crate) description: Description,
    pub(crate) layout: Layout,
    /// The files of each rank.
    pub(crate) files: BTreeMap<u64, Vec<Location>>,
    save: &'a StagedSave,
}

/// Why no checkpoint can be made of a save.
pub(crate) struct Defects {
    /// Whether a file is known to be missing. Not if a directory or the description cannot be read.
    pub(crate) is_incomplete: bool,
    pub(crate) reasons: Vec<String>,
}

enum Defect {
    Missing(String),
    Unreadable(String),
}

impl Described<'_> {
    /// Whether this save was staged before `other`.
    pub(crate) fn is_before(&self, other: &Self) -> bool {
        let later = other.id;
        (self.id.session == later.session && self.id.number < later.number)
            || other
                .description
                .staged
                .contains(&self.id.name(EntryKind::Description))
    }

    /// The greatest sequence that a checkpoint has if it was published before this save or by an
    /// earlier one of its session.
    fn last_sequence_before(&self) -> u64 {
        let Description {
            published, staged, ..
        } = &self.description;
        let is_earlier = |name: &&String| {
            SaveId::parse(name).is_some_and(|(earlier, _)| earlier.session == self.id.session)
        };
        published.saturating_add(staged.iter().filter(is_earlier).count() as u64)
    }
}

impl StagedList {
    /// Lists one staging directory.
    pub(crate) fn of(staging: Arc<Dir>) -> Result<Self, CkptError> {
        let mut list = Self::default();
        list.add(staging)?;
        Ok(list)
    }

    /// Adds the staged files of `path` and of its `.staging`. A directory that does not exist has
    /// none.
    pub(crate) fn search(&mut self, path: &Path) -> Result<(), CkptError> {
        let dir = match Dir::open(path) {
            Err(error) if error.is_missing() => return Ok(()),
            other => other?,
        };
        if dir.has(STAGING) {
            self.roots.insert(self.dirs.len(), path.to_owned());
            self.add(Arc::new(dir.open_dir(STAGING)?))?;
        }
        if path.file_name().is_some_and(|name| name == STAGING) {
            self.roots.insert(self.dirs.len(), path.join(".."));
        }
        self.add(Arc::new(dir))
    }

    fn add(&mut self, dir: Arc<Dir>) -> Result<(), CkptError> {
        let index = self.dirs.len();
        self.dirs.push(Arc::clone(&dir));
        for name in dir.names()? {
            let Some((id, kind)) = SaveId::parse(&name) else {
                self.removed
                    .extend(backup_of(&name).is_some().then_some(name));
                continue;
            };

            let save = self.saves.entry(id).or_default();
            let location = Location { dir: index, name };
            save.entries.push(location.clone());
            match kind {
                EntryKind::File(rank) => save.files.entry(rank).or_default().push(location),
                EntryKind::Description => save.descriptions.push(location),
                EntryKind::Ready => match dir.open_dir(&location.name).and_then(with_names) {
                    Ok((ready, names)) => {
                        save.add_ready(self.dirs.len(), names);
                        self.dirs.push(Arc::new(ready));
                    }
                    Err(error) => save.unreadable.push(error.to_string()),
                },
            }
        }
        Ok(())
    }

    /// Bytes of the files of a save.
    pub(crate) fn bytes(&self, save: &StagedSave) -> u64 {
        let bytes = |entry: &Location| self.dirs[entry.dir].bytes_of(&entry.name);
        save.entries.iter().map(bytes).sum()
    }

    /// Finds the files of a save.
    pub(crate) fn described<'a>(
        &self,
        id: SaveId,
        save: &'a StagedSave,
    ) -> Result<Described<'a>, Defects> {
        let mut reasons = save.unreadable.clone();
        self.find(id, save, &mut reasons).map_err(|defect| {
            let is_incomplete = save.unreadable.is_empty() && matches!(defect, Defect::Missing(_));
            let (Defect::Missing(reason) | Defect::Unreadable(reason)) = defect;
            reasons.insert(0, reason);
            Defects {
                is_incomplete,
                reasons,
            }
        })
    }

    fn find<'a>(
        &self,
        id: SaveId,
        save: &'a StagedSave,
        reasons: &mut Vec<String>,
    ) -> Result<Described<'a>, Defect> {
        let description = self.description(id, save)?;
        let manifest = &description.manifest;
        let layout = manifest.layout.layout(&manifest.model.units);
        let layout = layout.map_err(|e| {
            Defect::Unreadable(format!("its description has an invalid layout: {e}"))
        })?;

        // Not those of the checkpoint that the save has replaced by an exchange.
        let mut files = save.files.clone();
        for &ready in &save.ready {
            let dir = &self.dirs[ready];
            if description.is_replaced(dir) {
                let path = dir.path().display();
                reasons.push(format!("{path} holds another checkpoint"));
                files
                    .values_mut()
                    .for_each(|locations| locations.retain(|location| location.dir != ready));
            }
        }
        files.retain(|_, locations| !locations.is_empty());
        check_ranks(&files, layout.world_size())?;

        Ok(Described {
            id,
            description,
            layout,
            files,
            save,
        })
    }

    fn description(&self, id: SaveId, save: &StagedSave) -> Result<Description, Defect> {
        let missing = "its description, which rank 0 writes beside its file, is missing";
        let mut result = Err(Defect::Missing(missing.to_owned()));
        for Location { dir, name } in &save.descriptions {
            result = Description::read(&self.dirs[*dir], name, id.step)
                .map_err(|error| Defect::Unreadable(error.to_string()));
            if result.is_ok() {
                break;
            }
        }
        result
    }

    /// The newest checkpoint that was published after `save` was staged, in the directory of its
    /// description.
    pub(crate) fn published_after(&self, save: &Described<'_>) -> Option<PathBuf> {
        let descriptions = save.save.descriptions.iter();
        let mut roots = descriptions.filter_map(|location| self.roots.get(&location.dir));
        roots.find_map(|root| {
            let (published, _) = catalog::list(&Dir::open(root).ok()?).ok()?;
            let newest = published
                .last()
                .filter(|entry| entry.sequence > save.last_sequence_before())?;
            Some(root.join(&newest.name))
        })
    }
}

fn with_names(dir: Dir) -> Result<(Dir, Vec<String>), CkptError> {
    let names = dir.names()?;
    Ok((dir, names))
}

impl StagedSave {
    /// Adds the directory `dir`, an index, in which files have their final `names`.
    fn add_ready(&mut self, dir: usize, names: Vec<String>) {
        self.ready.push(dir);
        for name in names {
            if let Some(rank) = rank_of(&name) {
                let files = self.files.entry(rank).or_default();
                files.push(Location { dir, name });
            }
        }
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
fn check_ranks(files: &BTreeMap<u64, Vec<Location>>, world_size: u64) -> Result<(), Defect> {
    let missing = world_size - files.range(0..world_size).count() as u64;
    if missing == 0 {
        return Ok(());
    }
    let listed = (0..world_size).filter(|rank| !files.contains_key(rank));
    let listed: Vec<String> = listed
        .take(MAX_LISTED)
        .map(|rank| rank.to_string())
        .collect();
    let more = match missing - listed.len() as u64 {
        0 => String::new(),
        more => format!(" and {more} others"),
    };
    Err(Defect::Missing(format!(
        "the files of {missing} of {world_size} ranks are missing: {}{more}",
        listed.join(", ")
    )))
}

/// The remedy for the staged files of a failed save in the directory of checkpoints `root`, if
/// there are any and no run saves there now.
pub(crate) fn staged_hint(root: &Dir) -> Option<String> {
    if Lock::is_taken(root) {
        return None;
    }
    let list = StagedList::of(Arc::new(root.open_dir(STAGING).ok()?)).ok()?;
    let hint = format!(
        "a failed save has left files in its .staging: `{}` makes a checkpoint of those of all ranks",
        commands().assemble
    );
    (!list.saves.is_empty()).then_some(hint)
}

/// The remedy for a save that is staged completely, by the names of its files, and newer than all
/// checkpoints of `path`.
pub(crate) fn newer_staged(path: &Path) -> Option<String> {
    let mut list = StagedList::default();
    list.search(path).ok()?;
    let mut described = list
        .saves
        .iter()
        .rev()
        .filter_map(|(id, save)| list.described(*id, save).ok());
    let newer = described.find(|save| list.published_after(save).is_none())?;
    Some(format!(
        "all files of a newer save of step {} are staged: unless a run is saving right now, {} makes a checkpoint of \
         them",
        newer.id.step,
        commands().assemble_folders_text(&path.display().to_string())
    ))
}
