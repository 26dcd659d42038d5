//! What every back end promises: one suite, run for the host and for CUDA.
//!
//! The CUDA ones need a device: `cargo gpu-test`.

mod arena;
mod backend;
mod copies;
mod pool;
mod streams;

/// Every test of the suite for one back end.
macro_rules! conformance {
    ($name:ident, $backend:expr, $attribute:tt) => {
        mod $name {
            #[allow(unused_imports)]
            use crate::backend::*;

            conformance! {
                @ $backend, $attribute:
                streams::operations_run_in_order_and_synchronize_sees_them,
                streams::a_stream_waits_for_another_ones_event,
                streams::a_failure_names_stream_and_operation_and_spreads_by_waits,
                streams::what_came_before_a_failure_is_no_failure,
                streams::a_panic_becomes_an_error_that_names_it,
                streams::a_wait_has_a_limit,
                streams::what_is_enqueued_runs_though_the_handles_are_gone,
                copies::what_is_uploaded_comes_back_whatever_length_and_place,
                copies::copies_and_zeros_arrive_in_the_order_of_the_stream,
                copies::wrong_lengths_and_types_are_errors,
                copies::a_copy_behind_a_held_stream_ends_at_its_limit_and_leaves_others_alone,
                copies::threads_copy_at_once_without_mixing_their_bytes,
                pool::the_same_stream_reuses_at_once,
                pool::another_stream_reuses_behind_the_recorded_uses_and_the_home_stream,
                pool::a_part_taken_leaves_the_hazard_of_the_rest,
                pool::a_steady_step_takes_nothing_from_the_device,
                pool::trim_gives_back_what_is_free_at_the_end_and_done,
                pool::the_budget_is_a_limit_and_its_error_has_the_numbers,
                arena::contents_survive_compaction,
                arena::a_large_block_is_stitched_from_free_pages_and_live_ones_stay,
                arena::nothing_breaks_whatever_fails,
            }
        }
    };
    (@ $backend:expr, $attribute:tt: $($suite:ident::$test:ident,)*) => {
        $(
            #[test]
            # $attribute
            fn $test() {
                crate::$suite::$test(&$backend);
            }
        )*
    };
}

conformance!(host, Host::default(), [cfg(all())]);
conformance!(host_pages, Host { paged: true }, [cfg(not(miri))]);
conformance!(cuda_pages, Cuda::Pages, [ignore = "needs a CUDA device"]);
conformance!(cuda_backings, Cuda::Backings, [ignore = "needs a CUDA device"]);
conformance!(cuda_stream_ordered, Cuda::StreamOrdered, [ignore = "needs a CUDA device"]);
conformance!(cuda_shareable, Cuda::Shareable, [ignore = "needs a CUDA device"]);
