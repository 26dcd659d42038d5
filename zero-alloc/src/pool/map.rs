//! Pictures of a pool's memory: what holds what, and where the holes are.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::state::LENT;
use super::{Pool, Purpose};
use crate::device::Device;

/// One contiguous part of a pool's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its first offset.
    pub start: u64,
    /// Its size.
    pub bytes: u64,
    /// What it is held for; `None` is free.
    pub purpose: Option<Purpose>,
    /// Its address is known outside: compaction leaves it where it is.
    pub fixed: bool,
}

/// A pool's memory at one moment, by offset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryMap {
    /// The parts, in order; neighbours of the same kind are joined.
    pub spans: Vec<Span>,
}

const COLOURS: [&str; 6] = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"];
const FREE: &str = "#eeeeee";
const LETTERS: [char; 6] = ['P', 'G', 'O', 'B', 'A', 'W'];

impl<D: Device> Pool<D> {
    /// What lies where now.
    pub fn map(&self) -> MemoryMap {
        let (fronts, state) = self.lock();
        let mut lent: BTreeMap<u64, (u64, Option<u8>)> = BTreeMap::new();
        for front in &fronts {
            front.for_each_range(|start, bytes, tag| {
                lent.insert(start, (bytes, tag));
            });
        }
        let mut map = MemoryMap::default();
        state.planner.for_each_range(|start, bytes, tag, fixed| {
            if tag != Some(LENT) {
                return map.push(start, bytes, tag, fixed);
            }
            for (start, (bytes, tag)) in lent.range(start..start + bytes) {
                map.push(*start, *bytes, *tag, tag.is_some());
            }
        });
        map
    }
}

impl MemoryMap {
    fn push(&mut self, start: u64, bytes: u64, tag: Option<u8>, fixed: bool) {
        let purpose = tag.and_then(|tag| Purpose::ALL.get(tag as usize).copied());
        match self.spans.last_mut() {
            Some(last) if (last.purpose, last.fixed) == (purpose, fixed) && last.start + last.bytes == start => {
                last.bytes += bytes;
            }
            _ => self.spans.push(Span { start, bytes, purpose, fixed }),
        }
    }

    /// The offset behind the last part.
    pub fn end(&self) -> u64 {
        self.spans.last().map_or(0, |span| span.start + span.bytes)
    }

    /// One line of `width` characters: the first letter of what fills most of each column, `.` where that is nothing.
    pub fn text(&self, width: usize) -> String {
        let (end, width) = (self.end().max(1), width.max(1));
        let mut line = String::with_capacity(width);
        for column in 0..width as u64 {
            let edge = |column: u64| (u128::from(end) * u128::from(column) / width as u128) as u64;
            let (from, to) = (edge(column), edge(column + 1).max(edge(column) + 1));
            let mut held = [0u64; 7];
            for span in &self.spans {
                let overlap = (span.start + span.bytes).min(to).saturating_sub(span.start.max(from));
                held[span.purpose.map_or(6, |purpose| purpose as usize)] += overlap;
            }
            let most = (0..7).max_by_key(|kind| (held[*kind], std::cmp::Reverse(*kind))).unwrap_or(6);
            line.push(LETTERS.get(most).copied().filter(|_| held[most] > 0).unwrap_or('.'));
        }
        line
    }
}

/// Memory maps over time: one column each, offsets upwards.
#[derive(Clone, Debug, Default)]
pub struct MapHistory {
    maps: Vec<(String, MemoryMap)>,
}

impl MapHistory {
    /// Adds a moment, with a short name.
    pub fn push(&mut self, label: impl Into<String>, map: MemoryMap) {
        self.maps.push((label.into(), map));
    }

    /// One line for each moment.
    pub fn text(&self, width: usize) -> String {
        let name_width = self.maps.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0);
        let mut text = String::new();
        for (label, map) in &self.maps {
            let _ = writeln!(text, "{label:name_width$} |{}|", map.text(width));
        }
        text.push_str("P parameters, G gradients, O optimizer, B buckets, A activations, W workspace, . free\n");
        text
    }

    /// A picture: a column for each moment with offsets upwards, holes in grey, fixed blocks with a dark edge, and what
    /// is held of what is reserved below; a title on each part says its size.
    pub fn svg(&self) -> String {
        const HEIGHT: f64 = 400.0;
        const COLUMN: f64 = 72.0;
        const AXIS: f64 = 72.0;
        let end = self.maps.iter().map(|(_, map)| map.end()).max().unwrap_or(0).max(1) as f64;
        let width = AXIS + COLUMN * self.maps.len().max(1) as f64 + 120.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{}\" \
             font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
            HEIGHT + 52.0
        );
        for tick in 0..=4 {
            let y = HEIGHT * (1.0 - f64::from(tick) / 4.0) + 4.0;
            let bytes = readable(end * f64::from(tick) / 4.0);
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{bytes}</text>",
                AXIS - 8.0,
                y.max(8.0) + 4.0
            );
            let _ = writeln!(svg, "<path d=\"M{} {y}h6\" stroke=\"#999\"/>", AXIS - 6.0);
        }
        for (column, (label, map)) in self.maps.iter().enumerate() {
            let x = AXIS + COLUMN * column as f64 + 4.0;
            for span in &map.spans {
                let (height, bottom) = (span.bytes as f64 / end * HEIGHT, span.start as f64 / end * HEIGHT);
                let (colour, name) = match span.purpose {
                    Some(purpose) => (COLOURS[purpose as usize], format!("{purpose:?}")),
                    None => (FREE, "free".to_owned()),
                };
                let edge =
                    if span.fixed && span.purpose.is_some() { " stroke=\"#333\" stroke-width=\"0.5\"" } else { "" };
                let _ = writeln!(
                    svg,
                    "<rect x=\"{x}\" y=\"{:.2}\" width=\"{}\" height=\"{height:.2}\" fill=\"{colour}\"{edge}>\
                     <title>{name}: {} bytes at {}</title></rect>",
                    HEIGHT - bottom - height + 4.0,
                    COLUMN - 8.0,
                    span.bytes,
                    span.start
                );
            }
            let sum =
                |held: bool| map.spans.iter().filter(|s| !held || s.purpose.is_some()).map(|s| s.bytes).sum::<u64>();
            let (held, reserved) = (readable(sum(true) as f64), readable(sum(false) as f64));
            for (line, text) in [escape(label), format!("{held} of"), reserved].iter().enumerate() {
                let _ = writeln!(svg, "<text x=\"{x}\" y=\"{}\">{text}</text>", HEIGHT + 18.0 + 13.0 * line as f64);
            }
        }
        let legend = Purpose::ALL.iter().map(|purpose| format!("{purpose:?}")).zip(COLOURS);
        for (i, (name, colour)) in legend.chain([("free".to_owned(), FREE)]).enumerate() {
            let (x, y) = (width - 108.0, 14.0 + 18.0 * i as f64);
            let _ = writeln!(svg, "<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
            let _ = writeln!(svg, "<text x=\"{}\" y=\"{}\">{name}</text>", x + 18.0, y + 10.0);
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// Bytes in the unit that leaves one to three digits before the point.
fn readable(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let step = ((bytes.max(1.0).log2() / 10.0) as usize).min(units.len() - 1);
    let value = bytes / f64::powi(1024.0, step as i32);
    if value.fract() == 0.0 { format!("{value} {}", units[step]) } else { format!("{value:.1} {}", units[step]) }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(start: u64, bytes: u64, purpose: Option<Purpose>) -> Span {
        Span { start, bytes, purpose, fixed: false }
    }

    #[test]
    fn a_column_shows_what_fills_most_of_it() {
        let spans = vec![
            span(0, 50, Some(Purpose::Params)),
            span(50, 25, None),
            span(75, 20, Some(Purpose::Activations)),
            span(95, 5, None),
        ];
        let map = MemoryMap { spans };
        assert_eq!(map.text(8), "PPPP..AA");
        assert_eq!(map.text(2), "P.");
        assert_eq!(MemoryMap::default().text(3), "...");
    }

    #[test]
    fn the_picture_has_every_part_and_escapes_names() {
        let mut history = MapHistory::default();
        history.push("a<b", MemoryMap { spans: vec![span(0, 64, Some(Purpose::Grads)), span(64, 64, None)] });
        let svg = history.svg();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        for part in ["Grads: 64 bytes at 0", "free: 64 bytes at 64", "a&lt;b", "64 B of", ">128 B<", ">free<"] {
            assert!(svg.contains(part), "{svg}");
        }
        assert!(history.text(4).starts_with("a<b |GG..|\n"), "{}", history.text(4));
    }
}
