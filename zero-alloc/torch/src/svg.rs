//! A map of the arena as SVG: rows of addresses, from the top left, with blocks, free memory, and a
//! line of numbers.

use std::fmt::Write;

use zero_alloc::Report;
use zero_alloc::pool::MemoryMap;

const WIDTH: u64 = 1024;
const ROWS: u64 = 32;
const ROW_HEIGHT: u64 = 14;
const ROW_PITCH: u64 = 18;
const HEAD: u64 = 44;

const LIVE: &str = "#4682c8";
const FREE: &str = "#e8e8e8";

/// Draws the map.
pub(crate) fn svg(map: &MemoryMap, report: &Report) -> String {
    let end = map.end().max(1);
    let row_bytes = end.div_ceil(ROWS).max(1);
    let height = HEAD + ROWS * ROW_PITCH;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<text x=\"0\" y=\"14\">{} bytes live (peak {}), {} reserved, {} free, {} of these \
         contiguous</text>\n<text x=\"0\" y=\"32\">a row has {row_bytes} bytes; blue is live, grey is free</text>\n",
        report.total.live_bytes,
        report.total.peak_bytes,
        report.reserved_bytes,
        report.free_bytes,
        report.largest_free_bytes,
    );

    for span in &map.spans {
        let fill = if span.purpose.is_some() { LIVE } else { FREE };
        let span_end = span.start + span.bytes;
        for row in span.start / row_bytes..=(span_end - 1) / row_bytes {
            let from = span.start.max(row * row_bytes) - row * row_bytes;
            let to = span_end.min((row + 1) * row_bytes) - row * row_bytes;
            let x = pixels(from, row_bytes);
            let width = pixels(to, row_bytes) - x;
            let y = HEAD + row * ROW_PITCH;
            // Writing to a string does not fail.
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.2}\" y=\"{y}\" width=\"{width:.2}\" height=\"{ROW_HEIGHT}\" fill=\"{fill}\"/>"
            );
        }
    }

    svg.push_str("</svg>\n");
    svg
}

fn pixels(bytes: u64, row_bytes: u64) -> f64 {
    bytes as f64 / row_bytes as f64 * WIDTH as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use zero_alloc::device::{DType, Device};
    use zero_alloc::host::HostDevice;
    use zero_alloc::{Pool, Purpose};

    #[test]
    fn live_and_free_memory_is_drawn() {
        let device = HostDevice::new();
        let stream = device.create_stream("a").expect("a stream");
        let pool = Pool::new(device, 1 << 20);
        let block = |bytes| pool.allocate(bytes, DType::U8, Purpose::Workspace, &stream);
        let held = block(1 << 19).expect("allocated");
        let svg = svg(&pool.map(), &pool.report());
        assert!(
            svg.starts_with("<svg") && svg.ends_with("</svg>\n"),
            "{svg}"
        );
        assert!(svg.contains("524288 bytes live"), "{svg}");
        // Half of the rows each.
        let rows = |fill| svg.matches(fill).count();
        assert_eq!((rows(LIVE), rows(FREE)), (16, 16), "{svg}");
        drop(held);
    }

    #[test]
    fn an_empty_arena_is_drawn() {
        let svg = svg(&MemoryMap::default(), &Report::default());
        assert!(
            svg.contains("0 bytes live") && !svg.contains("NaN"),
            "{svg}"
        );
    }
}
