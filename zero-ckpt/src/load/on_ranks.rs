//! Opening one checkpoint on all ranks: rank 0 chooses and checks it, the others open what they
//! read.

use std::fmt::Display;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::agree::{Answer, follow, pend, unexpected};
use crate::format::manifest::{MANIFEST_NAME, hex64};
use crate::io::dir::Dir;
use crate::job::{Job, Watch};
use crate::messages::{Message, broadcast};
use crate::{CkptError, Exchange, Reader};

/// The checkpoint that a process has opened and checked: a small value to send to others that open
/// the same one. See [`Reader::open_selected`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Selection {
    /// Its name in the directory of checkpoints.
    pub name: String,
    /// Checksum of its manifest, which covers all other files; 16 hexadecimal digits in JSON.
    #[serde(with = "hex64")]
    pub crc64: u64,
}

impl Reader {
    /// This checkpoint, as a value for [`Reader::open_selected`] in other processes.
    pub fn selection(&self) -> Selection {
        let name = self
            .path()
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        Selection {
            name: name.unwrap_or_default(),
            crc64: self.crc64,
        }
    }

    /// Opens the checkpoint that another process has chosen and checked in `path`, a directory of
    /// checkpoints or that checkpoint. Reads its manifest and its description of tensor-parallel
    /// ranks only; each other file is opened, and its length and checksums are checked, when it is
    /// read.
    ///
    /// # Errors
    /// [`CkptError::NotSelected`] if the manifest is not the one that the other process read, or a
    /// failed read.
    pub fn open_selected(path: impl AsRef<Path>, selection: &Selection) -> Result<Self, CkptError> {
        let root = Dir::open(path.as_ref())?;
        let dir = if root.has(MANIFEST_NAME) {
            root
        } else {
            root.open_dir(&selection.name)?
        };
        let reader = Self::open_manifest(dir, Vec::new())?;
        match (selection.crc64, reader.crc64) {
            (expected, got) if expected == got => Ok(reader),
            (expected, got) => Err(CkptError::NotSelected {
                path: reader.path().into(),
                expected,
                got,
            }),
        }
    }

    /// Opens one checkpoint in `path` on all ranks; all ranks call it. Rank 0 calls `open`, which
    /// chooses and checks the checkpoint ([`Reader::open`] for the files' lengths,
    /// [`resolve`](crate::resolve) for every byte), and broadcasts its [`Selection`] or error. The
    /// others call [`Reader::open_selected`], so that N ranks open each file of a checkpoint a few
    /// times and not N times. While `open` runs, rank 0 broadcasts twice a second; so the time
    /// limit of the communicator need not cover the check.
    ///
    /// # Errors
    /// On rank 0 the error of `open`, which the others receive as [`CkptError::Rank`]; a failed
    /// exchange; or an error of [`Reader::open_selected`], which only the rank itself receives.
    pub fn open_on_ranks<E: Display + From<CkptError> + Send>(
        path: impl AsRef<Path>,
        rank: u64,
        exchange: &mut impl Exchange,
        open: impl FnOnce() -> Result<Self, E> + Send,
    ) -> Result<Self, E> {
        if rank > 0 {
            return match follow::<Selection>(None, exchange)? {
                Answer::Done(selection) => Ok(Self::open_selected(path, &selection)?),
                Answer::Gather => Err(unexpected().into()),
                Answer::Failed(error) => Err(error.into()),
            };
        }

        let opened = std::thread::scope(|scope| {
            let job = Job::start_scoped(scope, open);
            // `open` reads as long as it must: its progress is not known here.
            let watch = &mut Watch::new(Duration::MAX);
            pend(&job, watch, || 0, exchange)?;
            job.take()
        });

        let opened = opened.map_err(E::from).and_then(|opened| opened);
        let message = match &opened {
            Ok(reader) => Message::Done(reader.selection()),
            Err(error) => Message::error(error),
        };

        broadcast(&message, 0, exchange)?;
        opened
    }
}
