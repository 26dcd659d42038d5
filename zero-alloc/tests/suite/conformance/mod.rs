//! The conformance suite of back ends, run for the host and for each kind of CUDA memory.
//!
//! The CUDA tests need a device: `cargo gpu-test cuda`.

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
            use crate::conformance::backend::*;

            conformance! {
                @ $backend, $attribute:
                streams::operations_run_in_order,
                streams::stream_waits_for_an_event,
                streams::failure_is_named_and_spreads,
                streams::events_before_a_failure_succeed,
                streams::panic_becomes_an_error,
                streams::wait_has_a_limit,
                streams::operations_outlive_their_handles,
                copies::copy_round_trips_any_length,
                copies::copies_follow_stream_order,
                copies::copy_checks_lengths_and_types,
                copies::slices_of_another_device_are_refused,
                copies::blocked_copy_ends_at_its_limit,
                copies::download_keeps_its_place_in_the_stream,
                copies::concurrent_copies_do_not_mix,
                pool::same_stream_reuses_at_once,
                pool::other_stream_reuses_behind_uses,
                pool::partial_reuse_keeps_hazards,
                pool::steady_steps_allocate_nothing,
                pool::trim_frees_the_finished_end,
                pool::budget_error_has_the_numbers,
                arena::contents_survive_reuse,
                arena::large_block_is_stitched,
                arena::pool_survives_every_failing_call,
            }
        }
    };
    (@ $backend:expr, $attribute:tt: $($suite:ident::$test:ident,)*) => {
        $(
            #[test]
            # $attribute
            fn $test() {
                crate::conformance::$suite::$test(&$backend);
            }
        )*
    };
}

conformance!(host, Host::default(), [cfg(all())]);
conformance!(host_pages, Host { paged: true }, [cfg(not(miri))]);
#[cfg(feature = "cuda")]
conformance!(cuda_pages, Cuda::Pages, [ignore = "needs a CUDA device"]);
#[cfg(feature = "cuda")]
conformance!(
    cuda_backings,
    Cuda::Backings,
    [ignore = "needs a CUDA device"]
);
