//! Lays out a small transformer with a tied head. Prints the contents of a shard, a reshard plan
//! for another number of ranks, the units that each unit needs gathered, and the bytes that a rank
//! keeps and sends.

use zero_shard::{
    Layout, LayoutOptions, ParamSpec, ShardError, Tie, UnitSpec, Widths, ZeroStage, reshard_rank,
};

fn model() -> Vec<UnitSpec> {
    let block = |i: usize| {
        let param = |name: &str, shape: &[u64]| ParamSpec::new(format!("block.{i}.{name}"), shape);
        UnitSpec::new(
            format!("block.{i}"),
            [
                param("attn", &[64, 256]),
                param("mlp", &[64, 512]),
                param("ln", &[64]),
            ],
        )
    };
    let embedding = UnitSpec::new("embedding", [ParamSpec::new("wte", [1000, 64])]);
    let head = UnitSpec::new("head", [ParamSpec::new("ln_f", [64])]);
    [embedding]
        .into_iter()
        .chain((0..3).map(block))
        .chain([head])
        .collect()
}

fn main() -> Result<(), ShardError> {
    let options = LayoutOptions::default()
        .shard_align_elems(256) // 512 bytes at 2 bytes per element
        .ties(vec![Tie::new("head", "lm_head", "wte")]);
    let four = Layout::with_options(&model(), 4, options.clone())?;
    let three = Layout::with_options(&model(), 3, options)?;
    println!(
        "{} elements, {} with padding, {} a rank",
        four.numel_elems(),
        four.padded_elems(),
        four.shard_elems()
    );

    println!("\nrank 1 of 4 holds");
    for piece in four.rank_pieces(1)? {
        let name = four.param(piece.id).map_or("", |p| p.name.as_str());
        println!(
            "  {name:14} {:>13?} at {:?}",
            piece.in_param, piece.in_storage
        );
    }

    println!("\nrank 1 of 3 gets, from 4");
    for m in reshard_rank(&four, &three, 1)? {
        println!(
            "  rank {} {:>13?} to {:?}",
            m.from, m.from_range, m.to_range
        );
    }

    println!("\nat stage 3 the compute of each unit needs");
    for (unit, placed) in four.units().iter().enumerate() {
        let needed: Vec<&str> = four
            .units_needed_by(unit)
            .into_iter()
            .map(|u| four.units()[u].name.as_str())
            .collect();
        println!("  {:9} {needed:?}", placed.name);
    }

    println!("\nstage   kept, bytes   sent, bytes a step");
    for stage in ZeroStage::ALL {
        let kept = four.state_bytes(stage, &Widths::MIXED_ADAM)?.total_bytes();
        let sent = four
            .step_traffic(stage, &Widths::MIXED_ADAM, 1)?
            .total_bytes();
        println!("{stage:>5} {kept:>13} {sent:>20}");
    }

    Ok(())
}
