//! Loading: any range of any state, at any world size and stage, verified.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::OnceLock;

use zero_shard::{Layout, ParamPlacement, UnitLayout};

use crate::catalog;
use crate::coverage::Coverage;
use crate::dir::Dir;
use crate::manifest::{MANIFEST_NAME, Manifest};
use crate::runs::{Run, elems_of, runs};
use crate::shard_file::{ShardFile, open_checked};
use crate::transfer::IoOptions;
use crate::{CkptError, ModelSpec, StateDtype};

/// Bytes converted at once where the stored dtype is not fp32.
const CONVERT_BYTES: usize = 4 << 20;

/// A whole checkpoint, open for reading. Ranges may be read from many threads at once.
pub struct Reader {
    pub(crate) dir: Dir,
    pub(crate) manifest: Manifest,
    pub(crate) layout: Layout,
    pub(crate) coverage: Coverage,
    pub(crate) io: IoOptions,
    files: Vec<OnceLock<ShardFile>>,
    params: HashMap<String, (usize, ParamPlacement)>,
    notices: Vec<String>,
}

impl Reader {
    /// Opens `path`: a directory that runs save into, or one checkpoint in it (`.../step-00000030`).
    ///
    /// Of a directory, it is the checkpoint that `latest` names; where that is not whole (a file is missing or
    /// has another length, or the manifest is damaged), the whole checkpoint that was saved last, and
    /// [`Reader::notices`] says what was passed over and why. The content of files is verified when it is
    /// read: by [`Reader::read_param`], [`View::read_range`] and [`Reader::verify`].
    ///
    /// # Errors
    /// There is no whole checkpoint, with the reason for each candidate; or it cannot be read.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CkptError> {
        let root = Dir::open(path.as_ref())?;
        if root.has(MANIFEST_NAME) {
            return Self::open_one(root, Vec::new());
        }
        let mut notices = Vec::new();
        let latest = catalog::read_latest(&root);
        match latest.as_ref().map(|name| root.open_dir(name).and_then(|d| Self::open_one(d, Vec::new()))) {
            Ok(Ok(reader)) => return Ok(reader),
            Ok(Err(e)) => notices.push(e.to_string()),
            Err(e) if root.has(catalog::LATEST) => notices.push(e.to_string()),
            Err(_) => {}
        }
        let (entries, reasons) = catalog::list(&root)?;
        notices.extend(reasons.into_iter().filter(|r| !notices.contains(r)).collect::<Vec<_>>());
        for entry in entries.iter().rev().filter(|e| latest.as_ref().ok() != Some(&e.name)) {
            match root.open_dir(&entry.name).and_then(|d| Self::open_one(d, notices.clone())) {
                Ok(reader) => return Ok(reader),
                Err(e) => notices.push(e.to_string()),
            }
        }
        Err(CkptError::NoCheckpoint { dir: root.path().into(), reasons: notices })
    }

    fn open_one(dir: Dir, notices: Vec<String>) -> Result<Self, CkptError> {
        let (manifest, layout) = Manifest::read(&dir)?;
        for file in &manifest.files {
            open_checked(&dir, &file.name, file.bytes, false)?;
        }
        let pieces = manifest.files.iter().map(|f| f.pieces.as_slice());
        let coverage = Coverage::new(&layout, pieces, dir.path())?;
        let files = manifest.files.iter().map(|_| OnceLock::new()).collect();
        let params = layout.units().iter().enumerate();
        let params = params.flat_map(|(u, unit)| unit.params.iter().map(move |p| (p.name.clone(), (u, p.clone()))));
        let params = params.collect();
        Ok(Self { dir, manifest, layout, coverage, io: IoOptions::default(), files, params, notices })
    }

    /// Reads with other threads, chunks or cache use.
    pub fn with_io(mut self, io: IoOptions) -> Self {
        self.io = io;
        self
    }

    /// The directory of the checkpoint.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// What the checkpoint says of itself.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// What was passed over to come to this checkpoint, and why; empty where `latest` was whole.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// The parameters by name, each with its shape; in the order of the model.
    pub fn params(&self) -> impl Iterator<Item = &ParamPlacement> {
        self.layout.units().iter().flat_map(|u| &u.params)
    }

    /// This checkpoint seen through another layout of the same model.
    ///
    /// # Errors
    /// [`CkptError::AnotherModel`]: parameters have other names or shapes.
    pub fn view<'a>(&'a self, layout: &'a Layout) -> Result<View<'a>, CkptError> {
        match self.manifest.model.difference(&ModelSpec::from(layout)) {
            Some(difference) => Err(CkptError::AnotherModel { path: self.path().into(), difference }),
            None => Ok(View { reader: self, layout }),
        }
    }

    /// Reads elements `range` of parameter `param` (row-major, flat) of `state` as fp32, which is exact.
    ///
    /// # Errors
    /// No such state or parameter, a range outside it, another length of `out`, or the bytes are not those
    /// that were saved.
    pub fn read_param(&self, state: &str, param: &str, range: Range<u64>, out: &mut [f32]) -> Result<(), CkptError> {
        let found = self.params.get(param);
        let (unit, placed) =
            found.ok_or_else(|| CkptError::argument("parameter", "one of this checkpoint", param))?;
        check_range(param, placed.numel_elems, &range, out.len())?;
        let stored = placed.offset_elems + range.start..placed.offset_elems + range.end;
        self.read_stored(state, *unit, stored, out)
    }

    /// Reads elements of a unit as it was stored. The range lies within the unit and `out` fits it.
    pub(crate) fn read_stored(
        &self,
        state: &str,
        unit: usize,
        range: Range<u64>,
        out: &mut [f32],
    ) -> Result<(), CkptError> {
        let (index, dtype) = self.state(state)?;
        let mut rest = out;
        for (held, part) in self.coverage.find(unit, range) {
            let file = self.file(held.file)?;
            let tensor = file.plan.tensor_range(index, held.piece).start;
            let start = tensor + (part.start - held.start) * dtype.bytes();
            let (mut now, later) = rest.split_at_mut((part.end - part.start) as usize);
            rest = later;
            if dtype == StateDtype::F32 {
                file.read(&self.dir, start, bytemuck::cast_slice_mut(now), self.io)?;
                continue;
            }
            let (mut at, width) = (start, dtype.bytes() as usize);
            let mut buffer = vec![0; CONVERT_BYTES.min(now.len() * width)];
            while !now.is_empty() {
                let (head, tail) = now.split_at_mut(now.len().min(CONVERT_BYTES / width));
                let bytes = &mut buffer[..head.len() * width];
                file.read(&self.dir, at, bytes, self.io)?;
                dtype.widen(bytes, head);
                at += bytes.len() as u64;
                now = tail;
            }
        }
        Ok(())
    }

    /// Place and dtype of a state.
    pub(crate) fn state(&self, name: &str) -> Result<(usize, StateDtype), CkptError> {
        let found = self.manifest.states.iter().position(|s| s.name == name);
        found.map(|i| (i, self.manifest.states[i].dtype)).ok_or_else(|| CkptError::MissingState {
            path: self.path().into(),
            state: name.into(),
            available: self.manifest.states.iter().map(|s| s.name.clone()).collect(),
        })
    }

    /// A shard file, its front read and checked at first use.
    pub(crate) fn file(&self, index: usize) -> Result<&ShardFile, CkptError> {
        let slot = &self.files[index];
        match slot.get() {
            Some(file) => Ok(file),
            None => {
                let file = ShardFile::open(&self.dir, &self.manifest, index)?;
                Ok(slot.get_or_init(|| file))
            }
        }
    }
}

/// A checkpoint seen through a layout of its model: other units, other ranks, another alignment, any stage.
#[derive(Clone, Copy)]
pub struct View<'a> {
    reader: &'a Reader,
    layout: &'a Layout,
}

impl View<'_> {
    /// Reads elements `range` of unit `unit` of this view's layout as fp32. Elements are counted without
    /// padding: the parameters of the unit end to end, `numel_elems` in all.
    ///
    /// # Errors
    /// No such state or unit, a range beyond the real elements, another length of `out`, or the bytes are not
    /// those that were saved.
    pub fn read_range(&self, state: &str, unit: usize, range: Range<u64>, out: &mut [f32]) -> Result<(), CkptError> {
        let units = self.layout.units();
        let placed = units.get(unit);
        let placed = placed.ok_or_else(|| CkptError::argument("unit", format!("below {}", units.len()), unit))?;
        check_range(&placed.name, placed.numel_elems, &range, out.len())?;
        self.reader.state(state)?;
        // Where the stored unit has these parameters, it is read in one run; else parameter by parameter.
        if self.reader.layout.units().get(unit).is_some_and(|stored| same_params(stored, placed)) {
            return self.reader.read_stored(state, unit, range, out);
        }
        let mut rest = out;
        let first = placed.params.partition_point(|p| elems_of(placed, p).end <= range.start);
        for param in &placed.params[first..] {
            let whole = elems_of(placed, param);
            let part = whole.start.max(range.start)..whole.end.min(range.end);
            if part.start >= part.end {
                continue;
            }
            let (now, later) = rest.split_at_mut((part.end - part.start) as usize);
            rest = later;
            self.reader.read_param(state, &param.name, part.start - whole.start..part.end - whole.start, now)?;
        }
        Ok(())
    }

    /// Reads the shard of `rank` of unit `unit`: `shard_elems` elements, the padding set to zero.
    ///
    /// # Errors
    /// As [`View::read_range`].
    pub fn read_shard(&self, state: &str, unit: usize, rank: u64, out: &mut [f32]) -> Result<(), CkptError> {
        let units = self.layout.units();
        let placed = units.get(unit);
        let placed = placed.ok_or_else(|| CkptError::argument("unit", format!("below {}", units.len()), unit))?;
        if rank >= self.layout.world_size() {
            return Err(CkptError::argument("rank", format!("below {}", self.layout.world_size()), rank));
        }
        if out.len() as u64 != placed.shard_elems {
            let what = format!("elements of the shard of unit {:?}", placed.name);
            return Err(CkptError::argument(what, placed.shard_elems, out.len()));
        }
        let runs = runs(placed, rank);
        if runs.iter().map(Run::len).sum::<u64>() < placed.shard_elems {
            out.fill(0.0);
        }
        for run in runs {
            let at = run.in_shard();
            self.read_range(state, unit, run.elems, &mut out[at.start as usize..at.end as usize])?;
        }
        Ok(())
    }

    /// Reads the shard storage of `rank`: `layout.shard_elems()` elements, the padding set to zero.
    ///
    /// # Errors
    /// As [`View::read_range`].
    pub fn read_storage(&self, state: &str, rank: u64, out: &mut [f32]) -> Result<(), CkptError> {
        if out.len() as u64 != self.layout.shard_elems() {
            return Err(CkptError::argument("elements of the shard storage", self.layout.shard_elems(), out.len()));
        }
        for (u, unit) in self.layout.units().iter().enumerate() {
            let range = unit.shard_range();
            self.read_shard(state, u, rank, &mut out[range.start as usize..range.end as usize])?;
        }
        Ok(())
    }
}

/// Whether two units have the same parameters in the same order.
fn same_params(a: &UnitLayout, b: &UnitLayout) -> bool {
    let same = |(a, b): (&ParamPlacement, &ParamPlacement)| a.name == b.name && a.shape == b.shape;
    a.params.len() == b.params.len() && a.params.iter().zip(&b.params).all(same)
}

fn check_range(name: &str, numel: u64, range: &Range<u64>, out: usize) -> Result<(), CkptError> {
    if range.start > range.end || range.end > numel {
        let what = format!("range of {name:?}");
        return Err(CkptError::argument(
            what,
            format!("within 0..{numel}"),
            format!("{}..{}", range.start, range.end),
        ));
    }
    if out as u64 != range.end - range.start {
        return Err(CkptError::argument(format!("elements to read of {name:?}"), range.end - range.start, out));
    }
    Ok(())
}
