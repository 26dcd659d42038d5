//! A checkpoint described for people.

use std::fmt::{self, Display, Write as _};

use crate::Reader;

impl Reader {
    /// A table of what the checkpoint is and holds. Its contents are not read; see [`Reader::verify`].
    pub fn describe(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = self.write_description(&mut text);
        text
    }

    fn write_description(&self, out: &mut String) -> fmt::Result {
        let manifest = self.manifest();
        let bytes: u64 = manifest.files.iter().map(|f| f.bytes).sum();
        let states: Vec<_> = manifest.states.iter().map(|s| format!("{} ({})", s.name, s.dtype.name())).collect();
        let mut row = |name: &str, value: &dyn Display| writeln!(out, "{name:<14}{value}");
        row("checkpoint", &self.path().display())?;
        row("step", &manifest.step)?;
        row("saved as", &format_args!("save {} into this directory", manifest.sequence))?;
        row(
            "run",
            &format_args!("stage {}, {}, {} ranks", manifest.stage, manifest.dtype, manifest.layout.world_size),
        )?;
        row("elements", &group(self.layout.numel_elems()))?;
        row("states", &states.join(", "))?;
        row("size", &format_args!("{} bytes in {} files", group(bytes), manifest.files.len()))?;
        row("trainer", &manifest.trainer)?;
        for notice in self.notices() {
            row("passed over", notice)?;
        }
        let widest = self.layout.units().iter().map(|u| u.name.chars().count()).max().unwrap_or(0).max(4);
        writeln!(out, "\n{:<widest$}  {:>10}  {:>18}", "unit", "parameters", "elements")?;
        for unit in self.layout.units() {
            writeln!(out, "{:<widest$}  {:>10}  {:>18}", unit.name, unit.params.len(), group(unit.numel_elems))?;
        }
        let widest = manifest.files.iter().map(|f| f.name.len()).max().unwrap_or(0).max(4);
        writeln!(out, "\n{:<widest$}  {:>18}  {:>18}", "file", "elements", "bytes")?;
        for file in &manifest.files {
            let elems: u64 = file.pieces.iter().map(|p| p.elems()).sum();
            writeln!(out, "{:<widest$}  {:>18}  {:>18}", file.name, group(elems), group(file.bytes))?;
        }
        Ok(())
    }
}

/// 1234567 as "1,234,567".
fn group(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn digits_are_grouped() {
        let grouped = [0, 7, 999, 1000, 1234567, u64::MAX].map(super::group);
        assert_eq!(grouped, ["0", "7", "999", "1,000", "1,234,567", "18,446,744,073,709,551,615"]);
    }
}
