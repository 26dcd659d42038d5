//! The description of a checkpoint as text.

use std::fmt::{self, Display, Write as _};

use zero_shard::TensorCut;

use crate::{Reader, TensorParam};

impl Reader {
    /// Returns a table of the checkpoint's manifest. Does not read the state; see
    /// [`Reader::verify`].
    pub fn describe(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.write_description(&mut text);
        text
    }

    fn write_description(&self, out: &mut String) -> fmt::Result {
        self.write_properties(out)?;
        self.write_units(out)?;
        self.write_cuts(out)?;
        self.write_files(out)
    }

    fn write_properties(&self, out: &mut String) -> fmt::Result {
        let manifest = self.manifest();
        let ranks = manifest.layout.world_size;
        let bytes: u64 = manifest.files.iter().map(|f| f.bytes).sum();
        let states: Vec<_> = manifest
            .states
            .iter()
            .map(|s| format!("{} ({})", s.name, s.encoding))
            .collect();
        let mut row = |name: &str, value: &dyn Display| writeln!(out, "{name:<14}{value}");

        row("checkpoint", &self.path().display())?;
        row("step", &manifest.step)?;
        row(
            "saved as",
            &format_args!("save {} into this directory", manifest.sequence),
        )?;
        if let Some(run) = &manifest.run {
            row("run id", run)?;
        }

        row(
            "run",
            &format_args!(
                "stage {}, {}, {ranks} ranks",
                manifest.stage, manifest.dtype
            ),
        )?;

        if let Some(described) = self.tensor_parallel() {
            let tensor_ranks = described.ranks;
            row("parameters", &format_args!("cut over {tensor_ranks} ranks"))?;
        }
        row("elements", &grouped(self.whole_layout().numel_elems()))?;
        row("states", &states.join(", "))?;
        row(
            "size",
            &format_args!("{} bytes in {} files", grouped(bytes), manifest.files.len()),
        )?;
        row("trainer", &manifest.trainer)?;

        for document in &manifest.documents {
            row(
                "document",
                &format_args!("{}, {} bytes", document.name, grouped(document.bytes)),
            )?;
        }

        for notice in self.notices() {
            row("skipped", notice)?;
        }
        Ok(())
    }

    fn write_units(&self, out: &mut String) -> fmt::Result {
        let units = self.whole_layout().units();
        let width = width_of(units.iter().map(|unit| unit.name.as_str()));
        writeln!(
            out,
            "\n{:<width$}  {:>10}  {:>18}",
            "unit", "parameters", "elements"
        )?;
        for unit in units {
            writeln!(
                out,
                "{:<width$}  {:>10}  {:>18}",
                unit.name,
                unit.params.len(),
                grouped(unit.numel_elems)
            )?;
        }
        Ok(())
    }

    /// The whole parameters of a tensor-parallel run.
    fn write_cuts(&self, out: &mut String) -> fmt::Result {
        let Some(described) = self.tensor_parallel() else {
            return Ok(());
        };
        let ranks = described.ranks;
        let params = || described.units.iter().flat_map(|unit| &unit.params);
        let width = width_of(params().map(|param| param.name.as_str()));
        let shape_of = |param: &TensorParam| format!("{:?}", param.shape);
        writeln!(
            out,
            "\n{:<width$}  {:>20}  over {ranks} ranks",
            "parameter", "shape"
        )?;
        for param in params() {
            let cut = match param.cut {
                TensorCut::Replicated => "on every rank".to_owned(),
                TensorCut::Dim { dim, blocks: 1 } => format!("cut along dimension {dim}"),
                TensorCut::Dim { dim, blocks } => {
                    format!("cut along dimension {dim} in {blocks} blocks")
                }
            };
            writeln!(
                out,
                "{:<width$}  {:>20}  {cut}",
                param.name,
                shape_of(param)
            )?;
        }
        Ok(())
    }

    fn write_files(&self, out: &mut String) -> fmt::Result {
        let files = &self.manifest().files;
        let width = width_of(files.iter().map(|file| file.name.as_str()));
        writeln!(
            out,
            "\n{:<width$}  {:>18}  {:>18}",
            "file", "elements", "bytes"
        )?;
        for file in files {
            let elems: u64 = file.pieces.iter().map(|p| p.elems()).sum();
            writeln!(
                out,
                "{:<width$}  {:>18}  {:>18}",
                file.name,
                grouped(elems),
                grouped(file.bytes)
            )?;
        }
        Ok(())
    }
}

/// The width of a column of `names`, at least that of its heading.
fn width_of<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    names
        .map(|name| name.chars().count())
        .max()
        .unwrap_or(0)
        .max(4)
}

/// Formats 1234567 as "1,234,567".
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(String::from_utf8_lossy)
        .collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    #[test]
    fn digits_are_grouped() {
        let grouped = [0, 7, 999, 1000, 1234567, u64::MAX].map(super::grouped);
        assert_eq!(
            grouped,
            [
                "0",
                "7",
                "999",
                "1,000",
                "1,234,567",
                "18,446,744,073,709,551,615"
            ]
        );
    }
}
