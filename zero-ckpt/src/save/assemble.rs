//! A checkpoint of the staged files that a failed save has left, in one or several directories.

use std::os::unix::fs::FileExt;
use std::path::Path;

use super::records::{PublishedCheckpoint, StagedFile};
use super::staged::{Described, Location, StagedList, StagedSave};
use super::store::encode_header;
use crate::commands::commands;
use crate::format::file_layout::{FileLayout, checksum, shard_pieces};
use crate::format::manifest::{FileRecord, Manifest};
use crate::format::names::step_of_any;
use crate::format::staged_name::{EntryKind, SaveId};
use crate::io::dir::{Dir, FileId};
use crate::load::shard_file::ShardFile;
use crate::{CkptError, Reader, Store, StoreOptions};

/// The result of [`assemble`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Assembled {
    /// The checkpoint.
    pub checkpoint: PublishedCheckpoint,
    /// The other staged saves, each with its defects, or that it is complete.
    pub passed_over: Vec<String>,
}

/// Makes a checkpoint in the directory `into` of files that a failed save has staged, as the save
/// would have: the shard files are the same bytes, and the manifest differs in nothing. `from` are
/// the directories that ranks saved into, or their `.staging`, or copies of them; `into` is
/// searched too. Of several complete saves it takes the one that was staged last, unless a
/// checkpoint was published after that; see [`assemble_step`].
///
/// Reads and checks every byte. Files are linked into the checkpoint and synced, or copied from
/// another file system; no staged file is changed or removed.
///
/// # Errors
/// [`CkptError::NotAssembled`] with what is missing, damaged or ambiguous, or the checkpoint of
/// `into` of the same or a later step; `into` holds checkpoints of another run or model; or a
/// failed system call.
pub fn assemble<P: AsRef<Path>>(
    into: impl AsRef<Path>,
    from: &[P],
) -> Result<Assembled, CkptError> {
    assemble_chosen(into.as_ref(), from, None)
}

/// As [`assemble`], of a save of `step`, also if a checkpoint was published after it was staged:
/// the user may have continued from an older checkpoint since, and wants this branch all the same.
///
/// # Errors
/// As [`assemble`].
pub fn assemble_step<P: AsRef<Path>>(
    into: impl AsRef<Path>,
    from: &[P],
    step: u64,
) -> Result<Assembled, CkptError> {
    assemble_chosen(into.as_ref(), from, Some(step))
}

fn assemble_chosen<P: AsRef<Path>>(
    into: &Path,
    from: &[P],
    step: Option<u64>,
) -> Result<Assembled, CkptError> {
    let mut list = StagedList::default();
    list.search(into)?;
    for path in from {
        list.search(path.as_ref())?;
    }

    let mut reasons = Vec::new();
    let mut complete: Vec<Complete<'_>> = Vec::new();
    let chosen = list.saves.iter().rev();
    for (id, save) in chosen.filter(|(id, _)| step.is_none_or(|step| id.step == step)) {
        match Complete::check(&list, *id, save) {
            Ok(save) => complete.push(save),
            Err(defects) => reasons.push(format!("{id}: {}", defects.join(", "))),
        }
    }

    if complete.is_empty() && reasons.is_empty() {
        let of = step.map_or_else(String::new, |step| format!(" of step {step}"));
        reasons.push(format!("there are no staged files{of}"));
    }

    let Some(save) = take_newest(complete, &mut reasons) else {
        return Err(CkptError::NotAssembled { reasons });
    };
    let newer = if step.is_none() {
        list.published_after(&save.described)
    } else {
        None
    };

    match save.publish(into, newer.as_deref()) {
        Ok(checkpoint) => {
            take_model_files(into, &checkpoint.name, from)?;
            Ok(Assembled {
                checkpoint,
                passed_over: reasons,
            })
        }
        Err(CkptError::NotAssembled { reasons: refusal }) => {
            reasons.splice(0..0, refusal);
            Err(CkptError::NotAssembled { reasons })
        }
        Err(error) => Err(error),
    }
}

/// Keeps the files of the model in `into`, of the first directory that has them. Where none has,
/// those who need them say so.
fn take_model_files<P: AsRef<Path>>(
    into: &Path,
    checkpoint: &str,
    from: &[P],
) -> Result<(), CkptError> {
    let reader = Reader::open(into.join(checkpoint))?;
    let dirs = std::iter::once(into).chain(from.iter().map(AsRef::as_ref));
    let mut found = dirs.filter_map(|dir| reader.model_files_in(dir).ok().flatten());
    let Some(files) = found.next() else {
        return Ok(());
    };
    let options = StoreOptions::default().model_files(files);
    Store::create(into, 0, options).map(drop)
}

/// Returns the save that was staged last. Adds the others to `reasons`, or all of them if none is
/// known to be the last.
fn take_newest<'a>(
    mut complete: Vec<Complete<'a>>,
    reasons: &mut Vec<String>,
) -> Option<Complete<'a>> {
    if complete.is_empty() {
        return None;
    }
    let is_last = |save: &Complete<'_>| {
        let mut others = complete.iter().map(|other| &other.described);
        let last = &save.described;
        others.all(|other| other.id == last.id || other.is_before(last))
    };

    let last = complete
        .iter()
        .position(is_last)
        .map(|index| complete.remove(index));
    let names = complete.iter().map(|save| save.described.id.to_string());

    if last.is_some() {
        reasons.extend(names.map(|name| format!("{name}: complete, but staged before")));
    } else {
        let names: Vec<_> = names.collect();
        reasons.push(format!(
            "several saves are complete, and which one was staged last is not known; name a step \
             ({}), or move the others away: {}",
            commands().assemble_step,
            names.join(", ")
        ));
    }

    last
}

/// A save of which all files are whole.
struct Complete<'a> {
    list: &'a StagedList,
    described: Described<'a>,
    /// The file of each rank.
    files: Vec<WholeFile>,
}

/// A staged file of which every byte was checked, and the directory that holds it.
struct WholeFile {
    dir: usize,
    id: FileId,
    staged: StagedFile,
}

impl WholeFile {
    /// The file as one of `save`, with its name there.
    fn named(&self, save: SaveId) -> StagedFile {
        StagedFile {
            file: save.name(EntryKind::File(self.staged.rank)),
            save,
            ..self.staged.clone()
        }
    }
}

impl<'a> Complete<'a> {
    /// Checks every byte of a save; returns what is missing, damaged or ambiguous.
    fn check(list: &'a StagedList, id: SaveId, save: &'a StagedSave) -> Result<Self, Vec<String>> {
        let described = list
            .described(id, save)
            .map_err(|defects| defects.reasons)?;
        let mut probe = described.description.manifest.clone();
        let mut files = Vec::new();
        let mut defects = Vec::new();
        for (rank, locations) in described.files.range(0..described.layout.world_size()) {
            match whole_file(list, &described, &mut probe, (*rank, locations)) {
                Ok(file) => files.push(file),
                Err(error) => defects.push(error),
            }
        }

        if !defects.is_empty() {
            return Err(defects);
        }
        Ok(Self {
            list,
            described,
            files,
        })
    }
}

/// The whole one among copies of a rank's file. Copies that differ are an error. `probe` is the
/// manifest of the save, with one file at a time.
fn whole_file(
    list: &StagedList,
    save: &Described<'_>,
    probe: &mut Manifest,
    (rank, locations): (u64, &[Location]),
) -> Result<WholeFile, String> {
    let mut whole: Option<WholeFile> = None;
    let mut defect = None;
    for location in locations {
        let file = match read_whole(list, save, probe, (rank, location)) {
            Ok(file) => file,
            Err(error) => {
                defect = defect.or(Some(describe(&error)));
                continue;
            }
        };
        match &whole {
            Some(other) if other.staged.front_crc64 != file.staged.front_crc64 => {
                let path = list.dirs[location.dir].path().join(&location.name);
                return Err(format!(
                    "{} is another file of rank {rank}; move one away",
                    path.display()
                ));
            }
            Some(_) => {}
            None => whole = Some(file),
        }
    }
    whole.ok_or_else(|| defect.unwrap_or_default())
}

/// Reads and checks every byte of a staged file: its header is the one that the rank writes, the
/// blocks match the checksums behind it, and rank 0's file is the one that the description was
/// written for.
fn read_whole(
    list: &StagedList,
    save: &Described<'_>,
    probe: &mut Manifest,
    (rank, location): (u64, &Location),
) -> Result<WholeFile, CkptError> {
    let Location { dir: index, name } = location;
    let dir = &list.dirs[*index];
    let path = dir.path().join(name);
    let bad = |why: &str| CkptError::BadSafetensors {
        path: path.clone(),
        why: why.into(),
    };

    let pieces = shard_pieces(&save.layout, rank)?;
    let file_layout =
        FileLayout::new(&probe.states, &save.layout, pieces.clone()).map_err(|why| bad(&why))?;
    let at = (rank, probe.step);
    let header = encode_header(&save.layout, at, &probe.states, &file_layout)?;
    let front_bytes = header.len() as u64 + file_layout.table_bytes();
    let bytes = front_bytes + file_layout.state_bytes();

    let (id, front) = read_front(dir, name, bytes, front_bytes)?;
    let described = (rank == 0).then_some(save.description.front_crc64);
    let front_crc64 = check_front(&front, &header, described).map_err(bad)?;

    probe.files = vec![FileRecord {
        name: name.to_owned(),
        bytes,
        front_crc64,
        pieces: pieces.clone(),
    }];
    ShardFile::open(dir, probe, &save.layout, 0)?.verify(dir)?;

    let staged = StagedFile {
        rank,
        step: probe.step,
        file: name.to_owned(),
        bytes,
        front_crc64,
        states: probe.states.clone(),
        pieces,
        save: save.id,
    };

    Ok(WholeFile {
        dir: *index,
        id,
        staged,
    })
}

/// Opens a staged file of `bytes`; returns its identity and its first `front_bytes`.
fn read_front(
    dir: &Dir,
    name: &str,
    bytes: u64,
    front_bytes: u64,
) -> Result<(FileId, Vec<u8>), CkptError> {
    let path = dir.path().join(name);
    let (file, got_bytes) = dir.open_file(name, false)?;
    if got_bytes != bytes {
        return Err(CkptError::WrongLength {
            path,
            expected_bytes: bytes,
            got_bytes,
        });
    }

    let id = FileId::of(&file).map_err(CkptError::io("examine", &path))?;
    let mut front = vec![0; front_bytes as usize];
    file.read_exact_at(&mut front, 0)
        .map_err(CkptError::io("read", &path))?;
    Ok((id, front))
}

/// Checks the first bytes of a staged file and returns their checksum; `described` is the one in the
/// description.
fn check_front(front: &[u8], header: &[u8], described: Option<u64>) -> Result<u64, &'static str> {
    if !front.starts_with(header) {
        return Err(
            "its header is not that of the save: the file is damaged, unfinished or of another save",
        );
    }
    let crc64 = checksum(front);
    if described.is_some_and(|described| described != crc64) {
        return Err(
            "its checksums are not those in the description: it is damaged or of another save",
        );
    }
    Ok(crc64)
}

/// The text of an error; of a file that has disappeared since its name was read, with the likely
/// reason.
fn describe(error: &CkptError) -> String {
    let hint = if error.is_missing() {
        "; a run may be saving there right now: wait for its end"
    } else {
        ""
    };
    format!("{error}{hint}")
}

impl Complete<'_> {
    /// Publishes the checkpoint in `into`. Refuses if a checkpoint there is of the same or a later
    /// step, or if there is a checkpoint `newer` than the save; before any file is linked or copied.
    fn publish(self, into: &Path, newer: Option<&Path>) -> Result<PublishedCheckpoint, CkptError> {
        let description = &self.described.description;
        let mut options = StoreOptions::default().resumed_runs(description.resumed_runs.clone());
        options.run = description.manifest.run.clone();
        let store = Store::create(into, 0, options)?;
        store.check_runs()?;
        self.check_newest(&store, newer)?;

        let documents = description.documents();
        store.check_publication(&description.manifest, &documents)?;

        // Under names of its own, from which the publication moves them.
        let own = store.save_id(self.described.id.step, 0);
        let staged: Vec<_> = self.files.iter().map(|file| file.named(own)).collect();
        let linked = self.files.iter().zip(&staged).try_for_each(|(file, to)| {
            let dir = &self.list.dirs[file.dir];
            dir.link_or_copy(&file.staged.file, &file.id, &store.staging, &to.file)
        });
        let published = linked.and_then(|()| {
            let manifest = description.manifest.clone();
            store.publish_manifest(manifest, &staged, &documents, description.best)
        });

        if published.is_err() {
            for file in &staged {
                let _ = store.staging.remove_file(&file.file);
            }
        }
        published
    }

    /// Refuses if `store` has a checkpoint of the same or a later step, or if there is a checkpoint
    /// `newer` than the save.
    fn check_newest(&self, store: &Store, newer: Option<&Path>) -> Result<(), CkptError> {
        let id = self.described.id;
        let refused = |why: String| CkptError::NotAssembled {
            reasons: vec![format!("{id} {why}")],
        };

        let published = store.published();
        let latest = published
            .iter()
            .max_by_key(|entry| step_of_any(&entry.name));
        if let Some(latest) = latest.filter(|entry| step_of_any(&entry.name) >= Some(id.step)) {
            let into = store.path().display();
            return Err(refused(format!(
                "is complete, but {into} has {}, of the same or a later step; name a new folder first: {}",
                latest.name,
                commands().assemble_folders_text(&format!("NEW {into}"))
            )));
        }

        let Some(newer) = newer else {
            return Ok(());
        };
        Err(refused(format!(
            "is complete, but {} was published after it was staged; to take it all the same, name its step: {}",
            newer.display(),
            commands().assemble_step_text(id.step)
        )))
    }
}
