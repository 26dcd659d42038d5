//! Lays out a small transformer with a tied head, and prints who owns what, what moves when the number of
//! ranks changes, when units are gathered, and what a rank keeps and sends.

use zero_shard::{
    Action, Layout, LayoutOptions, ParamSpec, PrefetchLimits, PrefetchPlan, ShardError, Tie, UnitSpec, Widths,
    ZeroStage, align_elems_for, forward_backward_uses, reshard_rank,
};

fn model() -> Vec<UnitSpec> {
    let block = |i: usize| {
        let param = |name: &str, shape: &[u64]| ParamSpec::new(format!("block.{i}.{name}"), shape);
        UnitSpec::new(format!("block.{i}"), [param("attn", &[64, 256]), param("mlp", &[64, 512]), param("ln", &[64])])
    };
    let embedding = UnitSpec::new("embedding", [ParamSpec::new("wte", [1000, 64])]);
    let head = UnitSpec::new("head", [ParamSpec::new("ln_f", [64])]);
    [embedding].into_iter().chain((0..3).map(block)).chain([head]).collect()
}

fn main() -> Result<(), ShardError> {
    let options = LayoutOptions {
        shard_align_elems: align_elems_for(512, &[2, 4])?,
        ties: vec![Tie::new("head", "lm_head", "wte")],
        ..LayoutOptions::default()
    };
    let four = Layout::with_options(&model(), 4, options.clone())?;
    let three = Layout::with_options(&model(), 3, options)?;
    println!("{} elements, {} with padding, {} a rank", four.numel_elems(), four.padded_elems(), four.shard_elems());

    println!("\nrank 1 of 4 holds");
    for piece in four.rank_pieces(1)? {
        let name = four.param(piece.id).map_or("", |p| p.name.as_str());
        println!("  {name:14} {:>13?} at {:?}", piece.in_param, piece.in_storage);
    }

    println!("\nrank 1 of 3 gets, from 4");
    for m in reshard_rank(&four, &three, 1)? {
        println!("  rank {} {:>13?} to {:?}", m.from, m.from_range, m.to_range);
    }

    let elems: Vec<u64> = four.units().iter().map(|u| u.padded_elems).collect();
    let limits = PrefetchLimits { max_live_elems: 160_000, prefetch_elems: 64_000, max_reuse_distance_elems: 0 };
    let plan = PrefetchPlan::new(&elems, &[], &forward_backward_uses(&four, 1), &limits)?;
    println!("\none step at stage 3, at most {} elements live:", plan.peak_live_elems);
    let name = |unit: usize| &four.units()[unit].name;
    for action in &plan.actions {
        match *action {
            Action::Gather(unit) => println!("    gather {}", name(unit)),
            Action::Use(at) => println!("use {at}"),
            Action::Release(unit) => println!("    release {}", name(unit)),
        }
    }

    println!("\nstage   kept, bytes   sent, bytes a step");
    for stage in ZeroStage::ALL {
        let kept = four.state_bytes(stage, &Widths::MIXED_ADAM)?.total_bytes();
        let sent = four.step_traffic(stage, &Widths::MIXED_ADAM, 1)?.total_bytes();
        println!("{stage:>5} {kept:>13} {sent:>20}");
    }
    Ok(())
}
