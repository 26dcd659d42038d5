//! Opening the directory on all ranks, before training: all must see the same one. See
//! [`agree`](crate::agree).
//!
//! ```text
//! rank 0         opens, writes DIR/.staging/shared.<random>, broadcasts that name and its session
//! other ranks    open, look for that file
//! all ranks      gather, until none is pending
//! rank 0         removes incomplete saves, and broadcasts "pending" meanwhile; broadcasts the outcome
//! ```

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::agree::{
    Answer, FAILED, PENDING, READY, fail, failed, follow, gather, number, pend, ready, record,
    stall_error, unexpected,
};
use crate::format::names::random;
use crate::job::{Job, Watch};
use crate::messages::{Message, broadcast, shorten};
use crate::{CkptError, Exchange, Store, StoreOptions};

/// Prefix of the file that rank 0 writes for the others to see.
pub(crate) const SHARED: &str = "shared.";

/// Attempts to see rank 0's file; a network file system may show it late.
const LOOKS: u32 = 5;
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The action of a rank without progress, for the error.
const WAITS: &str = "has waited for its checkpoint folder";

/// Rank 0's open store.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Opened {
    /// The file that all ranks must see.
    file: String,
    session: u64,
    run: Option<String>,
    /// Rank 0's directory, for error messages.
    dir: String,
}

impl Store {
    /// [`Store::create`] on all ranks together, and the check that all of them see one directory;
    /// all ranks call it. `check` is called with the open store, such as for [`Store::check_runs`]
    /// and [`Store::check_model`].
    ///
    /// The stores of all ranks then have one session and the run of rank 0, which
    /// [`assemble`](crate::assemble) needs to tell the files of a save. Every rank sends messages
    /// while it opens, so that the time limit of the communicator need not cover that;
    /// [`StoreOptions::stall_limit`] does. It limits the wait of a rank for its own file system too:
    /// a thread opens the directory, and is left behind if that does not answer.
    ///
    /// Then rank 0 removes the staged files of saves of this run, and of those that it resumed,
    /// that no checkpoint can be made of. [`Store::take_notices`] returns what else is staged:
    /// complete saves, and those of other runs.
    ///
    /// # Errors
    /// All ranks return the error of the first rank that failed, as [`CkptError::Rank`], or
    /// [`CkptError::NotShared`]; or a failed exchange.
    pub fn create_on_ranks(
        path: impl AsRef<Path>,
        rank: u64,
        options: StoreOptions,
        exchange: &mut impl Exchange,
        check: impl FnOnce(&Store) -> Result<(), CkptError> + Send + 'static,
    ) -> Result<Self, CkptError> {
        let path = path.as_ref().to_owned();
        let limit = options.stall_limit;
        let open = move || {
            let store = Self::create(path, rank, options)?;
            check(&store).map(|()| store)
        };
        match rank {
            0 => lead(limit, open, exchange),
            rank => join(rank, limit, open, exchange),
        }
    }
}

/// Rank 0's part.
fn lead(
    limit: Duration,
    open: impl FnOnce() -> Result<Store, CkptError> + Send + 'static,
    exchange: &mut impl Exchange,
) -> Result<Store, CkptError> {
    let mut watch = Watch::new(limit);
    let job = Job::start(|| announced(open()?));
    let opened = match pend(&job, &mut watch, || 0, exchange)? {
        true => job.take().and_then(|opened| opened),
        false => Err(stall_error(0, WAITS, &watch, 0)),
    };
    let (store, opened) = match opened {
        Ok(opened) => opened,
        Err(error) => return Err(fail(error, None, exchange)),
    };

    let agreed = broadcast(&Message::Done(opened.clone()), 0, exchange)
        .and_then(|_| lead_agreement(&mut Watch::new(limit), exchange));
    let _ = store.staging.remove_file(&opened.file);
    agreed?;

    let store = clean(store, &mut Watch::new(limit), exchange)?;
    broadcast(&Message::Done(opened), 0, exchange)?;
    Ok(store)
}

/// Gathers until all ranks have opened the directory; broadcasts the error if one could not.
fn lead_agreement(watch: &mut Watch, exchange: &mut impl Exchange) -> Result<(), CkptError> {
    loop {
        let gathered = gather(&record(READY, 0, []), exchange)?;
        let refusal = match ready(&gathered, None, watch, WAITS) {
            Ok(Some(records)) => {
                let refusing = records.iter().position(|r| number(r, 0) == FAILED);
                refusing.map(|rank| failed(rank as u64))
            }
            Ok(None) => {
                broadcast(&Message::<()>::Gather, 0, exchange)?;
                continue;
            }
            Err(error) => Some(error),
        };
        return match refusal {
            Some(error) => Err(fail(error, None, exchange)),
            None => Ok(()),
        };
    }
}

/// Removes incomplete saves, and broadcasts "pending" while that makes progress: the first save may
/// need their space.
fn clean(
    store: Store,
    watch: &mut Watch,
    exchange: &mut impl Exchange,
) -> Result<Store, CkptError> {
    let progress = Arc::clone(&store.progress);
    let progress = || progress.load(Ordering::Relaxed);
    let find = Job::start(move || {
        store.remove_incomplete_saves();
        store
    });

    if !pend(&find, watch, progress, exchange)? {
        let error = stall_error(0, "has searched its staged files", watch, progress());
        return Err(fail(error, None, exchange));
    }

    let store = match find.take() {
        Ok(store) => store,
        Err(error) => return Err(fail(error, None, exchange)),
    };

    if let Some(removals) = store.removals.take_job()
        && !pend(&removals, watch, progress, exchange)?
    {
        // Training need not wait for them.
        store.removals.put_back(removals);
    }

    Ok(store)
}

/// Writes the file that the others look for.
fn announced(store: Store) -> Result<(Store, Opened), CkptError> {
    let file = format!("{SHARED}{}", random());
    store.staging.write_new(&file, b"")?;
    let dir = absolute(store.path());
    let opened = Opened {
        file,
        session: store.session,
        run: store.options.run.clone(),
        dir,
    };
    Ok((store, opened))
}

/// The part of another rank.
fn join(
    rank: u64,
    limit: Duration,
    open: impl FnOnce() -> Result<Store, CkptError> + Send + 'static,
    exchange: &mut impl Exchange,
) -> Result<Store, CkptError> {
    let of_rank_0 = match follow::<Opened>(None, exchange)? {
        Answer::Done(opened) => opened,
        Answer::Gather => return Err(unexpected()),
        Answer::Failed(error) => return Err(error),
    };

    let job = Job::start(move || {
        let mut store = open()?;
        look_for(&store, rank, &of_rank_0)?;
        store.join(of_rank_0.session, of_rank_0.run);
        Ok(store)
    });

    let period = Watch::new(limit).period();
    let mut result: Option<Result<Store, CkptError>> = None;
    loop {
        if result.is_none() && job.wait(period) {
            result = Some(job.take().and_then(|store| store));
        }
        let kind = match &result {
            Some(Ok(_)) => READY,
            Some(Err(_)) => FAILED,
            None => PENDING,
        };
        let own = result.as_ref().and_then(|result| result.as_ref().err());
        let sent = gather(&record(kind, rank, []), exchange);
        match (sent.and_then(|_| follow::<Opened>(own, exchange)), result) {
            (Ok(Answer::Gather), so_far) => result = so_far,
            (Ok(Answer::Done(_)), done) => return done.unwrap_or_else(|| Err(unexpected())),
            (Ok(Answer::Failed(error)), _) => return Err(error),
            // Ranks that know this rank's error may end before this one has heard the answer.
            (Err(_), Some(Err(own))) => return Err(own),
            (Err(error), _) => return Err(error),
        }
    }
}

/// Checks that this rank sees the file of rank 0.
fn look_for(store: &Store, rank: u64, of_rank_0: &Opened) -> Result<(), CkptError> {
    for _ in 0..LOOKS {
        if store.staging.has(&of_rank_0.file) {
            return Ok(());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let own = absolute(store.path());
    let message = format!(
        "its checkpoint folder {own} is not the folder {} of rank 0",
        of_rank_0.dir
    );
    Err(CkptError::NotShared { rank, message })
}

fn absolute(path: &Path) -> String {
    let absolute = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    shorten(&absolute.display().to_string())
}
