//! The choice of algorithms by their time on the device.
//!
//! Why by time: cuBLASLt's estimate knows no addend, and whether it splits the long sums of weight
//! gradients decides over a sixth of a step. Why once on a machine: the order of a product's sums,
//! and with it the bits, must not change from run to run; what cannot be kept is not used. Ranks on
//! different machines need not exchange choices: each has other data, and gradients are summed
//! afterwards, so replicas stay equal. A product that adds is measured on a temporary block, any
//! other on its own result, which it overwrites anyway. Nothing is measured while a graph is
//! recorded, nor by `Matmul::new` without `with_timing`: tests of bits use that.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use zero_alloc::Pool;
use zero_alloc::cuda::{CudaDevice, CudaStream};
use zero_kernels::cuda::user_folder;

use super::kept::{Choices, Contents};
use crate::cuda::OpError;

/// The variable that switches timing off with the value 0.
pub const TIMING_VARIABLE: &str = "ZERO_MATMUL_TIMING";
/// The variable with the folder of choices.
pub const FOLDER_VARIABLE: &str = "ZERO_MATMUL_CACHE";

/// The limit of a wait for the device, or for another process that measures. The device may wait
/// for ranks that still compile their kernels.
pub(super) const LIMIT: Duration = Duration::from_secs(600);
/// Times of each candidate, each of the second of two runs.
const ROUNDS: usize = 4;
/// After the first round only candidates within this factor of the fastest are measured again.
const FACTOR: f64 = 1.25;
/// The first candidate within this factor of the fastest is chosen: smaller differences change from
/// run to run.
const SAME: f64 = 1.01;

/// Products choose their algorithm by time: each shape is measured once, on the device, when a
/// product of this shape first runs. The choice is kept in a folder, for this card, driver, version
/// of cuBLASLt and product, and used from then on by all processes, so that the bits of a product
/// stay the same on a machine. Ranks on one machine share the folder and so the choices; ranks on
/// different machines may choose differently, which changes bits, but no rank's copy of the
/// parameters: gradients are summed after the products.
///
/// The files select machine code: keep the folder as safe from others as the program itself.
/// Symbolic links, and files of other users than this one and root, are refused.
///
/// Products that add to their result are measured on a temporary block of the pool, of the size of
/// the result.
#[derive(Debug)]
pub struct Timing {
    choices: Choices,
    pub(super) pool: Pool<CudaDevice>,
    /// A choice could not be written. Other ranks may measure what was not kept, so this process
    /// measures no more.
    unwritable: AtomicBool,
    lock_limit: Duration,
    /// For tests: the candidate that counts as the fastest.
    fastest: Option<usize>,
}

impl Timing {
    /// Keeps choices in the user's folder: `ZERO_MATMUL_CACHE`, or `zero-matmul` in
    /// `XDG_CACHE_HOME` or in `HOME/.cache`. `None` if none of these is set, or if
    /// `ZERO_MATMUL_TIMING` is 0.
    pub fn of_user(pool: &Pool<CudaDevice>) -> Option<Self> {
        let is_off = std::env::var_os(TIMING_VARIABLE).is_some_and(|value| value == "0");
        let folder = if is_off {
            None
        } else {
            user_folder(FOLDER_VARIABLE, "zero-matmul")
        };
        folder.map(|folder| Self::at(folder, pool))
    }

    /// Keeps choices in `folder`, which is created when needed.
    pub fn at(folder: impl Into<PathBuf>, pool: &Pool<CudaDevice>) -> Self {
        let choices = Choices::at(&folder.into());
        Self {
            choices,
            pool: pool.clone(),
            unwritable: AtomicBool::new(false),
            lock_limit: LIMIT,
            fastest: None,
        }
    }

    /// The limit of a wait for another process that measures the same product; 600 s by default.
    #[must_use]
    pub fn lock_limit(self, lock_limit: Duration) -> Self {
        Self { lock_limit, ..self }
    }

    /// The candidate with this index counts as the fastest, whatever its time: for tests, whose
    /// results must not depend on the clock.
    #[doc(hidden)]
    #[must_use]
    pub fn prefer(self, candidate: usize) -> Self {
        Self {
            fastest: Some(candidate),
            ..self
        }
    }

    /// Returns the choice that is kept for `subject`. If none is kept, `measure` makes it, as a
    /// table for the reader and the choice itself. `None`: nothing is kept, and nothing can be
    /// measured now or kept.
    ///
    /// `accept` returns `None` for a kept choice that is not valid; it is measured anew.
    pub(super) fn choose<T>(
        &self,
        stream: &CudaStream,
        subject: &str,
        accept: impl Fn(&str) -> Option<T>,
        measure: impl FnOnce() -> Result<Option<(String, String)>, OpError>,
    ) -> Result<Option<T>, OpError> {
        if let Some(kept) = self
            .choices
            .find(subject)
            .and_then(|choice| accept(&choice))
        {
            return Ok(Some(kept));
        }
        if stream.is_recorded() || self.unwritable.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let path = self.path(subject);

        let not_kept = |error: std::io::Error| {
            tracing::warn!(
                "the choice of a matrix product cannot be kept in {path} ({error}): this process uses the first \
                 algorithm that cuBLASLt proposes; set {FOLDER_VARIABLE} to a folder of this user that can be written"
            );
            self.unwritable.store(true, Ordering::Relaxed);
            Ok(None)
        };

        let locked = match self.choices.lock(subject, self.lock_limit) {
            Ok(locked) => locked,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                return Err(OpError::ChoiceLocked {
                    path,
                    limit: self.lock_limit,
                });
            }
            Err(error) => return not_kept(error),
        };

        match locked.read() {
            Ok(Contents::Nothing) => {}
            Ok(Contents::Choice(choice)) => match accept(&choice) {
                Some(kept) => return Ok(Some(kept)),
                None => {
                    tracing::warn!("{path}: cuBLASLt rejects the kept choice; it is measured anew")
                }
            },
            Ok(Contents::Damaged) => {
                tracing::warn!("{path} is damaged or foreign; its choice is measured anew")
            }
            Err(error) => return not_kept(error),
        }

        let Some((table, choice)) = measure()? else {
            return Ok(None);
        };
        match locked.write(&table, &choice) {
            Ok(()) => Ok(accept(&choice)),
            Err(error) => not_kept(error),
        }
    }

    /// The file of a choice.
    pub(super) fn path(&self, subject: &str) -> String {
        self.choices.path(subject).display().to_string()
    }

    /// Measures `count` candidates in turn and returns the least time of each. `time` returns
    /// `None` if a candidate does not run; it then has no time.
    pub(super) fn measure(
        &self,
        count: usize,
        mut time: impl FnMut(usize) -> Result<Option<Duration>, OpError>,
    ) -> Result<Vec<Option<Duration>>, OpError> {
        let mut least = vec![Some(Duration::MAX); count];
        for round in 0..ROUNDS {
            let best = least.iter().flatten().min().copied().unwrap_or_default();
            for (index, least) in least.iter_mut().enumerate() {
                if let Some(so_far) =
                    least.filter(|so_far| round == 0 || is_within(*so_far, best, FACTOR))
                {
                    *least = time(index)?.map(|new| new.min(so_far));
                }
            }
        }
        if let Some(fastest) = self.fastest {
            let times = least.iter_mut().enumerate();
            times.for_each(|(index, time)| {
                *time = time.map(|_| Duration::from_micros((index != fastest).into()))
            });
        }
        Ok(least)
    }
}

fn is_within(time: Duration, best: Duration, factor: f64) -> bool {
    time.as_secs_f64() <= best.as_secs_f64() * factor
}

/// The candidate to use: the first whose time is about the least.
pub(super) fn fastest(times: &[Option<Duration>]) -> Option<usize> {
    let best = times.iter().flatten().min()?;
    times
        .iter()
        .position(|time| time.is_some_and(|time| is_within(time, *best, SAME)))
}

/// The candidates with their times, the chosen one marked.
pub(super) fn table(times: &[Option<Duration>], names: impl Iterator<Item = String>) -> String {
    let chosen = fastest(times);
    let row = |(index, (time, name)): (usize, (&Option<Duration>, String))| {
        let time = time.map_or("failed".to_owned(), |time| {
            format!("{:.1} us", time.as_secs_f64() * 1e6)
        });
        format!(
            "{} {time:>12}  {name}\n",
            if chosen == Some(index) { '*' } else { ' ' }
        )
    };
    times.iter().zip(names).enumerate().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_of_about_equal_candidates_is_chosen() {
        let times = |micros: &[u64]| -> Vec<Option<Duration>> {
            micros
                .iter()
                .map(|&t| (t > 0).then(|| Duration::from_micros(t)))
                .collect()
        };
        assert_eq!(fastest(&times(&[300, 0, 201, 200])), Some(2));
        assert_eq!(fastest(&times(&[300, 0, 204, 200])), Some(3));
        assert_eq!(fastest(&times(&[0, 0])), None);
        assert_eq!(fastest(&[]), None);
        let shown = table(
            &times(&[300, 0, 200]),
            ["a", "b", "c"].into_iter().map(str::to_owned),
        );
        assert_eq!(
            shown,
            "      300.0 us  a\n        failed  b\n*     200.0 us  c\n"
        );
    }
}
