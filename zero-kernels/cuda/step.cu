// The rules of a step on the device, so that a step needs no host wait and can be captured in a graph. Host version:
// src/step.rs, with the same structs and the same operations in the same order. Each kernel is one thread.
//
// rank_stats: combines the statistics of this rank's units. advance_step: computes the scalars of the step's
// updates, one for each set of rates, from the statistics of all ranks, and updates the loss scale and the step counts.
// `rates` has `scalar_count` entries for each of `positions` positions.

struct GradStats {
    double sum_sq;
    u64 nonfinite;
};

struct RankStats {
    double sum_sq;
    u64 nonfinite;
    u64 first_bad_unit;
    double loss;
    u64 flags;
};

struct StepConfig {
    double max_grad_norm;
    double min_scale;
    u64 window;
    u64 micro_batches;
    u64 first_position;
    u32 dynamic;
    u32 hysteresis;
    u32 consecutive_hysteresis;
    u32 fail_at_min;
    double divisor;
};

struct StepRates {
    double lr;
    float of_rule[RULE_SCALARS];
};

struct StepState {
    double loss_scale;
    u64 iteration;
    u64 since;
    u64 adam_steps;
    u64 schedule_position;
    u64 skipped_steps;
    u32 hysteresis_left;
    u32 halted;
};

struct StepRecord {
    double grad_norm;
    double clip;
    double lr;
    double loss;
    u64 flags_any;
    u64 flags_all;
    double loss_scale;
    u64 nonfinite;
    u64 bad_rank;
    u64 bad_unit;
    double next_loss_scale;
    u64 iteration;
    u32 skipped;
    u32 halted;
};

static_assert(sizeof(RankStats) == 40 && sizeof(StepConfig) == 64, "as on the host");
static_assert(sizeof(StepState) == 56 && sizeof(StepRecord) == 104, "as on the host");
static_assert(sizeof(StepRates) == 32 && sizeof(StepScalars) == 32, "as on the host");

#define NONE 0xffffffffffffffffull
#define HALT_AT_MINIMUM 1
#define HALT_NO_RATE 2

extern "C" __global__ void rank_stats(const GradStats *units, u64 count, const double *loss, const u64 *flags,
                                      RankStats *out) {
    RankStats stats = {0.0, 0, NONE, *loss, *flags};
    // The sum is in unit order; unrolling keeps many loads in flight.
#pragma unroll 16
    for (u64 unit = 0; unit < count; unit++) {
        stats.sum_sq = __dadd_rn(stats.sum_sq, units[unit].sum_sq);
        stats.nonfinite += units[unit].nonfinite;
        if (units[unit].nonfinite > 0 && stats.first_bad_unit == NONE) stats.first_bad_unit = unit;
    }
    *out = stats;
}

__device__ __forceinline__ bool is_finite(double x) {
    return (__double_as_longlong(x) & 0x7ff0000000000000ll) != 0x7ff0000000000000ll;
}

// Counts a step and updates the loss scale. Returns false, with nothing changed, on an overflow at the minimum scale
// if `fail_at_min` is set.
__device__ __forceinline__ bool count_step(const StepConfig &config, StepState &s, bool overflow) {
    if (config.dynamic) {
        if (overflow) {
            if (config.hysteresis == 0) {
                // The scale never halves.
            } else if (s.hysteresis_left > 1) {
                s.hysteresis_left -= 1;
            } else if (s.loss_scale <= config.min_scale && config.fail_at_min) {
                return false;
            } else {
                double half = s.loss_scale * 0.5;
                s.loss_scale = half > config.min_scale ? half : config.min_scale;
            }
            s.since = s.iteration + 1;
        } else {
            u64 good_steps = s.iteration - s.since;
            bool grows = good_steps > 0 && good_steps % config.window == 0;
            if (config.consecutive_hysteresis || grows) s.hysteresis_left = config.hysteresis;
            if (grows) s.loss_scale = s.loss_scale * 2.0;
        }
    }
    s.iteration += 1;
    if (overflow) {
        s.skipped_steps += 1;
    } else {
        s.adam_steps += 1;
        s.schedule_position += 1;
    }
    return true;
}

extern "C" __global__ void advance_step(const RankStats *ranks, u64 rank_count, const StepConfig *config_at,
                                        const StepRates *rates, u64 positions, StepState *state,
                                        StepScalars *scalars, u64 scalar_count, StepRecord *records,
                                        u64 record_count) {
    StepConfig config = *config_at;
    StepState s = *state;
    for (u64 i = 0; i < scalar_count; i++) scalars[i] = {0.0f, {}, 1};
    // A run stays halted until the host resets its state.
    if (s.halted) return;
    double sum_sq = 0.0;
    StepRecord record = {0.0, 0.0, 0.0, 0.0, 0, NONE, s.loss_scale, 0, NONE, NONE, 0.0, s.iteration, 1, 0};
#pragma unroll 8
    for (u64 rank = 0; rank < rank_count; rank++) {
        sum_sq = __dadd_rn(sum_sq, ranks[rank].sum_sq);
        record.loss = __dadd_rn(record.loss, ranks[rank].loss);
        record.flags_any |= ranks[rank].flags;
        record.flags_all &= ranks[rank].flags;
        record.nonfinite += ranks[rank].nonfinite;
        bool bad = ranks[rank].nonfinite > 0 || !is_finite(ranks[rank].sum_sq);
        if (bad && record.bad_rank == NONE) {
            record.bad_rank = rank;
            record.bad_unit = ranks[rank].first_bad_unit;
        }
    }
    u64 at = s.schedule_position - config.first_position;
    if (s.schedule_position < config.first_position || at >= positions) {
        s.halted = HALT_NO_RATE;
    } else if (record.bad_rank != NONE) {
        record.lr = rates[at * scalar_count].lr;
        if (!count_step(config, s, true)) s.halted = HALT_AT_MINIMUM;
    } else {
        double divisor = __dmul_rn(__dmul_rn(s.loss_scale, (double)rank_count), (double)config.micro_batches);
        if (config.divisor > 0.0) divisor = __dmul_rn(s.loss_scale, config.divisor);
        record.lr = rates[at * scalar_count].lr;
        record.grad_norm = __ddiv_rn(__dsqrt_rn(sum_sq), divisor);
        record.clip = 1.0;
        if (config.max_grad_norm > 0.0 && record.grad_norm > config.max_grad_norm)
            record.clip = __ddiv_rn(config.max_grad_norm, __dadd_rn(record.grad_norm, 1e-6));
        record.skipped = 0;
        for (u64 i = 0; i < scalar_count; i++) {
            StepRates now = rates[at * scalar_count + i];
            StepScalars out;
            out.grad_scale = (float)__ddiv_rn(record.clip, divisor);
            for (int j = 0; j < RULE_SCALARS; j++) out.of_rule[j] = now.of_rule[j];
            out.skip = 0;
            scalars[i] = out;
        }
        count_step(config, s, false);
    }
    record.next_loss_scale = s.loss_scale;
    record.halted = s.halted;
    records[record.iteration % record_count] = record;
    *state = s;
}
