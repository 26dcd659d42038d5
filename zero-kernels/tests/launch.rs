//! The launches of every back end: one suite (`suite/`), run on the host and on CUDA.

mod common;
mod suite;

macro_rules! on_every_device {
    ($($(#[$attribute:meta])* $place:ident :: $test:ident),* $(,)?) => {
        mod host {
            $(
                #[test]
                $(#[$attribute])*
                fn $test() {
                    super::suite::$place::$test(&super::suite::Rig::host());
                }
            )*
        }

        mod cuda {
            $(
                #[test]
                $(#[$attribute])*
                #[ignore = "needs a CUDA device"]
                fn $test() {
                    super::suite::$place::$test(&super::suite::Rig::cuda());
                }
            )*
        }
    };
}

on_every_device! {
    adam::adam_without_a_parameter_of_its_own,
    adam::adam_to_fp32_parameters,
    adam::adam_to_bf16_parameters,
    adam::adam_to_fp16_parameters,
    adam::adam_on_parameters_with_remainders,
    adam::a_skipped_step_writes_nothing,
    flat::cast_from_fp32,
    flat::cast_from_bf16,
    flat::cast_from_fp16,
    #[cfg_attr(miri, ignore = "many values")] flat::every_rounding_point,
    flat::accumulate_from_every_type,
    flat::grad_stats_of_every_type,
    flat::grad_stats_of_extremes,
    decide::votes,
    decide::decisions,
    order::a_step_runs_in_stream_order_and_reads_its_scalars_when_it_runs,
    refused::bad_arguments_of_adam,
    refused::bad_arguments_of_adam_without_masters,
    refused::bad_arguments_of_casts_sums_and_statistics,
    refused::bad_arguments_of_decisions,
    #[cfg(not(miri))] torch::adamw_agrees_with_torch_to_the_last_place_and_its_moments_exactly,
    #[cfg(not(miri))] torch::adam_with_l2_agrees_with_torch,
}
