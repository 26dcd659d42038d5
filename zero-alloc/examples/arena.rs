//! A pool whose free memory is in pieces, and a block that is stitched from them, drawn as SVG.
//!
//! `cargo run -p zero-alloc --example arena > map.svg`

use std::error::Error;
use std::sync::Arc;

use plotters::prelude::*;
use zero_alloc::device::{DType, Device};
use zero_alloc::host::{HostDevice, HostPages};
use zero_alloc::pool::MemoryMap;
use zero_alloc::{Pool, Purpose};

const PAGE_BYTES: usize = 64 << 10;
const BUDGET_BYTES: usize = 16 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let pages = HostPages::new(PAGE_BYTES, BUDGET_BYTES)?;
    let device = HostDevice::new().with_pages(Arc::new(pages));
    let stream = device.create_stream("compute")?;
    let pool = Pool::new(device, BUDGET_BYTES);

    let state = pool.allocate(1 << 20, DType::F32, Purpose::Optimizer, &stream)?;
    let mut activations = Vec::new();
    for layer in 1..=12 {
        let elems = layer * 2 * PAGE_BYTES;
        activations.push(pool.allocate(elems, DType::U8, Purpose::Activations, &stream)?);
    }

    let mut history = vec![("full", pool.map())];

    // Frees every second block, so that the free memory is in pieces.
    let mut layer = 0;
    activations.retain(|_| {
        layer += 1;
        layer % 2 == 0
    });
    history.push(("holes", pool.map()));
    let before = pool.report();

    let bytes = before.free_bytes / PAGE_BYTES * PAGE_BYTES;
    let bucket = pool.allocate(bytes, DType::U8, Purpose::Buckets, &stream)?;
    history.push(("stitched", pool.map()));

    for (label, map) in &history {
        eprintln!("{label:10} |{}|", map.text(72));
    }
    eprintln!("{:10}  O optimizer, A activations, B bucket, . free", "");
    eprintln!(
        "{} bytes were free; the largest hole was {} bytes, and a block of {bytes} bytes got {} pages from all of them",
        before.free_bytes,
        before.largest_free_bytes,
        pool.report().stitched_pages
    );
    println!("{}", draw(&history)?);
    drop((state, bucket));

    Ok(())
}

/// Draws memory maps over time as SVG: a column for each map, offsets in MiB upwards, free memory
/// in grey.
fn draw(history: &[(&str, MemoryMap)]) -> Result<String, Box<dyn Error>> {
    let colour = |purpose: Option<Purpose>| match purpose {
        Some(purpose) => Palette99::pick(purpose as usize).to_rgba(),
        None => RGBColor(230, 230, 230).to_rgba(),
    };

    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let end = history.iter().map(|(_, map)| map.end()).max().unwrap_or(1);
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, (560, 480)).into_drawing_area();
    root.fill(&WHITE)?;
    let (plot, legend) = root.split_horizontally(450);
    let mut chart = ChartBuilder::on(&plot)
        .margin(14)
        .x_label_area_size(30)
        .y_label_area_size(58)
        .build_cartesian_2d(0.0..history.len() as f64, 0.0..mib(end))?;

    chart
        .configure_mesh()
        .disable_mesh()
        .x_labels(2 * history.len() + 1)
        .x_label_formatter(&|x| match x.fract() {
            0.5 => history
                .get(*x as usize)
                .map_or(String::new(), |(label, _)| (*label).to_owned()),
            _ => String::new(),
        })
        .y_desc("offset, MiB")
        .draw()?;

    for (i, (_, map)) in history.iter().enumerate() {
        chart.draw_series(map.spans.iter().map(|span| {
            let corners = [
                (i as f64 + 0.1, mib(span.start)),
                (i as f64 + 0.9, mib(span.start + span.bytes)),
            ];
            Rectangle::new(corners, colour(span.purpose).filled())
        }))?;
    }

    for (i, purpose) in Purpose::ALL.map(Some).into_iter().chain([None]).enumerate() {
        let y = 20 + 20 * i as i32;
        let name = purpose.map_or("free".to_owned(), |purpose| format!("{purpose:?}"));
        legend.draw(&Rectangle::new(
            [(0, y), (12, y + 12)],
            colour(purpose).filled(),
        ))?;
        legend.draw(&Text::new(name, (18, y), ("sans-serif", 14)))?;
    }

    root.present()?;
    drop((chart, plot, legend, root));
    Ok(svg)
}
