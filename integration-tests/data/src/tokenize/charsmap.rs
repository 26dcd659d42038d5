//! SentencePiece's table of replaced characters: a trie as a double array of 32-bit units, then the
//! replacements as text, each with a zero byte behind it.
//!
//! The library follows the trie without checks. Format: `darts.h` (Darts-clone) and `normalizer.cc`
//! of SentencePiece.

use std::collections::BTreeSet;

/// Longest run of bytes that the library looks up: those of a short cluster of characters.
const MAX_KEY_BYTES: usize = 5;

/// One unit of the double array.
#[derive(Clone, Copy)]
struct Unit(usize);

impl Unit {
    fn has_leaf(self) -> bool {
        self.0 >> 8 & 1 == 1
    }

    fn value(self) -> usize {
        self.0 & ((1 << 31) - 1)
    }

    fn label(self) -> usize {
        self.0 & (1 << 31 | 0xff)
    }

    fn offset(self) -> usize {
        (self.0 >> 10) << ((self.0 & 1 << 9) >> 6)
    }
}

/// The most bytes that the table, in base64, makes of one.
///
/// The error says why the table cannot be used with every text.
pub(super) fn growth(base64: &str) -> Result<usize, String> {
    let bytes = base64::decode(base64).map_err(|e| e.to_string())?;
    let (units, texts) = parse(&bytes).ok_or("it ends within its table")?;
    let ends_early = "an entry leads outside its table";
    let root = units.first().ok_or(ends_early)?.offset();

    let mut growth = 1;
    let mut seen = BTreeSet::from([root]);
    let mut nodes = vec![root];
    for depth in 1..=MAX_KEY_BYTES {
        let mut deeper = Vec::new();
        for node in nodes {
            for byte in 1..=255 {
                let at = node ^ byte;
                let unit = units.get(at).ok_or(ends_early)?;
                if unit.label() != byte {
                    continue;
                }
                let child = at ^ unit.offset();
                if unit.has_leaf() {
                    let leaf = units.get(child).ok_or(ends_early)?;
                    let text = texts.get(leaf.value()..).ok_or(ends_early)?;
                    let len = text.find('\0').unwrap_or(text.len());
                    growth = growth.max(len.div_ceil(depth));
                }
                if seen.insert(child) {
                    deeper.push(child);
                }
            }
        }
        nodes = deeper;
    }
    Ok(growth)
}

/// The units and the texts.
fn parse(bytes: &[u8]) -> Option<(Vec<Unit>, &str)> {
    let (len, rest) = bytes.split_first_chunk()?;
    let len = u32::from_le_bytes(*len) as usize / 4 * 4;
    let (units, texts) = rest.split_at_checked(len)?;
    let (units, _) = units.as_chunks();
    let units = units
        .iter()
        .map(|unit| Unit(u32::from_le_bytes(*unit) as usize));
    Some((units.collect(), std::str::from_utf8(texts).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table whose only key is `a`, replaced by the first text.
    fn table() -> Vec<u32> {
        // The root's children start at 256, and the leaf of `a` is at 512.
        let mut units = vec![0; 768];
        units[0] = 256 << 10;
        let at: u32 = 256 ^ u32::from(b'a');
        units[at as usize] = (at ^ 512) << 10 | 1 << 8 | u32::from(b'a');
        units
    }

    fn encoded(units: &[u32], text: &str) -> String {
        let mut bytes = ((units.len() * 4) as u32).to_le_bytes().to_vec();
        bytes.extend(units.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend(text.as_bytes());
        base64::encode(bytes)
    }

    #[test]
    fn growth_is_that_of_the_longest_replacement() {
        let text = "bcd\0";
        assert_eq!(growth(&encoded(&table(), text)), Ok(3));
        assert_eq!(growth(&encoded(&table(), &"b".repeat(500))), Ok(500));
    }

    #[test]
    fn table_that_leads_outside_is_an_error() {
        let text = "bcd\0";
        let whole = table();
        let mut leaf = whole.clone();
        leaf[512] = 5;
        let mut inside = whole.clone();
        inside[512] = 1;
        let mut child = whole.clone();
        child[0] = 768 << 10;
        for (units, text) in [
            (leaf, text),
            (inside, "é\0"),
            (child, text),
            (whole[..400].to_vec(), text),
            (Vec::new(), ""),
        ] {
            assert!(growth(&encoded(&units, text)).is_err());
        }
        // The probes of the review.
        for table in ["/////wAAAAAAAAAA", "BAAAAP////8=", "", "AAAA", "no base64!"] {
            assert!(growth(table).is_err(), "{table}");
        }
    }
}
