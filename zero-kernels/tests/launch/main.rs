//! The launches of every back end: one suite, run on the host and on CUDA.
#![allow(unreachable_pub)]

mod adam;
mod block_kernels;
#[path = "../common/mod.rs"]
mod common;
mod flat;
mod muon_kernels;
#[cfg(feature = "cuda")]
mod newton_schulz_cuda;
mod order;
mod refused;
mod rig;
mod step;
#[cfg(not(miri))]
mod torch;

use rig::Rig;

macro_rules! on_every_device {
    ($($(#[$attribute:meta])* $module:ident :: $test:ident),* $(,)?) => {
        mod host {
            $(
                #[test]
                $(#[$attribute])*
                fn $test() {
                    super::$module::$test(&super::Rig::host());
                }
            )*
        }

        #[cfg(feature = "cuda")]
        mod cuda {
            $(
                #[test]
                $(#[$attribute])*
                #[ignore = "needs a CUDA device"]
                fn $test() {
                    super::$module::$test(&super::Rig::cuda());
                }
            )*
        }

        /// The host's kernels on pinned memory.
        #[cfg(feature = "cuda")]
        mod cuda_pinned {
            $(
                #[test]
                $(#[$attribute])*
                #[ignore = "needs a CUDA device"]
                fn $test() {
                    super::$module::$test(&super::Rig::pinned());
                }
            )*
        }
    };
}

on_every_device! {
    adam::adam_without_parameter_output,
    adam::adam_to_fp32_parameters,
    adam::adam_to_bf16_parameters,
    adam::adam_to_fp16_parameters,
    adam::adam_with_remainders,
    adam::skipped_step_writes_nothing,
    #[cfg_attr(miri, ignore = "many values")] block_kernels::encode_from_every_type,
    #[cfg_attr(miri, ignore = "many values")] block_kernels::decode_to_every_type,
    #[cfg_attr(miri, ignore = "many values")] block_kernels::adam_with_8_bit_moments,
    #[cfg_attr(miri, ignore = "many values")] block_kernels::adam_with_4_bit_moments,
    muon_kernels::direction_from_every_type,
    #[cfg_attr(miri, ignore = "many values")] muon_kernels::momentum_in_blocks,
    muon_kernels::apply_to_every_type,
    muon_kernels::apply_with_remainders,
    muon_kernels::muon_skips,
    flat::cast_from_fp32,
    flat::cast_from_bf16,
    flat::cast_from_fp16,
    flat::cast_rows_of_every_type,
    #[cfg_attr(miri, ignore = "many values")] flat::every_rounding_point,
    flat::accumulate_from_every_type,
    flat::grad_stats_of_every_type,
    flat::grad_stats_of_extremes,
    flat::grad_stats_of_many,
    flat::pack_of_every_type,
    flat::pack_of_many_parts,
    step::rank_stats,
    step::advance_step,
    order::scalars_are_read_in_stream_order,
    refused::bad_arguments_of_updates,
    refused::bad_arguments_of_updates_with_remainders,
    refused::bad_arguments_of_flat_operations,
    refused::bad_arguments_of_step_operations,
    #[cfg(not(miri))] torch::adamw_agrees_with_torch,
    #[cfg(not(miri))] torch::adam_with_l2_agrees_with_torch,
}

/// On CUDA alone: the host's have no other products.
#[cfg(feature = "cuda")]
mod cuda_matrices {
    use super::{Rig, newton_schulz_cuda};

    #[test]
    #[ignore = "needs a CUDA device"]
    fn bits_are_those_of_a_plain_loop() {
        newton_schulz_cuda::bits_are_those_of_a_plain_loop(&Rig::cuda());
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn extremes() {
        newton_schulz_cuda::extremes(&Rig::cuda());
    }

    #[test]
    #[ignore = "needs a CUDA device"]
    fn refused_without_products() {
        newton_schulz_cuda::refused_without_products(&Rig::cuda());
    }
}
