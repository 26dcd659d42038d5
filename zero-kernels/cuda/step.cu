// The decision of a step on the device, so that a step needs no host wait and can be captured in a graph.
// Host twin: src/step.rs, with the same structs and the same operations in the same order. One thread each.
//
// make_vote: this rank's vote from the statistics of its units. decide_step: what the step multiplies with, from all
// ranks' votes; moves the loss scale by DeepSpeed's rules.

struct GradStats {
    double sum_sq;
    u64 nonfinite;
};

struct Vote {
    double sum_sq;
    u64 nonfinite;
    u64 first_bad_unit;
    double loss;
    u64 flags;
};

struct StepSettings {
    double max_grad_norm;
    double min_scale;
    u64 window;
    u64 micro_batches;
    u64 first_position;
    u32 dynamic;
    u32 hysteresis;
    u32 consecutive_hysteresis;
    u32 fail_at_min;
};

struct StepRates {
    double lr;
    double beta1;
    double beta2;
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

struct StepReport {
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

static_assert(sizeof(Vote) == 40 && sizeof(StepSettings) == 56, "as on the host");
static_assert(sizeof(StepState) == 56 && sizeof(StepReport) == 104, "as on the host");

#define NONE 0xffffffffffffffffull
#define HALT_AT_MINIMUM 1
#define HALT_NO_RATE 2

extern "C" __global__ void make_vote(const GradStats *units, u64 count, const double *loss, const u64 *flags,
                                     Vote *out) {
    Vote vote = {0.0, 0, NONE, *loss, *flags};
    // One thread adds, in order; unrolled, so that it waits for memory once for many.
#pragma unroll 16
    for (u64 unit = 0; unit < count; unit++) {
        vote.sum_sq = __dadd_rn(vote.sum_sq, units[unit].sum_sq);
        vote.nonfinite += units[unit].nonfinite;
        if (units[unit].nonfinite > 0 && vote.first_bad_unit == NONE) vote.first_bad_unit = unit;
    }
    *out = vote;
}

__device__ __forceinline__ bool is_finite(double x) {
    return (__double_as_longlong(x) & 0x7ff0000000000000ll) != 0x7ff0000000000000ll;
}

// base^exponent by squaring, from the highest bit down: the same products on every machine.
__device__ __forceinline__ double power(double base, u64 exponent) {
    double result = 1.0;
    for (int bit = 63 - __clzll((long long)exponent); bit >= 0; bit--) {
        result = __dmul_rn(result, result);
        if (exponent >> bit & 1) result = __dmul_rn(result, base);
    }
    return result;
}

// Counts a step; false at the minimum scale.
__device__ __forceinline__ bool update_scale(const StepSettings &set, StepState &s, bool overflow) {
    if (!set.dynamic) {
        s.iteration += 1;
        return true;
    }
    if (overflow) {
        if (s.hysteresis_left > 1) {
            s.hysteresis_left -= 1;
        } else if (s.loss_scale <= set.min_scale && set.fail_at_min) {
            return false;
        } else {
            double half = s.loss_scale * 0.5;
            s.loss_scale = half > set.min_scale ? half : set.min_scale;
        }
        s.since = s.iteration + 1;
    } else {
        u64 good = s.iteration - s.since;
        bool grows = good > 0 && good % set.window == 0;
        if (set.consecutive_hysteresis || grows) s.hysteresis_left = set.hysteresis;
        if (grows) s.loss_scale = s.loss_scale * 2.0;
    }
    s.iteration += 1;
    return true;
}

extern "C" __global__ void decide_step(const Vote *votes, u64 ranks, const StepSettings *settings,
                                       const StepRates *rates, u64 rate_count, StepState *state, StepScalars *scalars, StepReport *reports,
                                       u64 report_count) {
    StepSettings set = *settings;
    StepState s = *state;
    *scalars = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1};
    // A halted run stays so until the host has looked.
    if (s.halted) return;
    double sum_sq = 0.0;
    StepReport report = {0.0, 0.0, 0.0, 0.0, 0, NONE, s.loss_scale, 0, NONE, NONE, 0.0, s.iteration, 1, 0};
#pragma unroll 8
    for (u64 rank = 0; rank < ranks; rank++) {
        sum_sq = __dadd_rn(sum_sq, votes[rank].sum_sq);
        report.loss = __dadd_rn(report.loss, votes[rank].loss);
        report.flags_any |= votes[rank].flags;
        report.flags_all &= votes[rank].flags;
        report.nonfinite += votes[rank].nonfinite;
        bool bad = votes[rank].nonfinite > 0 || !is_finite(votes[rank].sum_sq);
        if (bad && report.bad_rank == NONE) {
            report.bad_rank = rank;
            report.bad_unit = votes[rank].first_bad_unit;
        }
    }
    u64 at = s.schedule_position - set.first_position;
    if (s.schedule_position < set.first_position || at >= rate_count) {
        s.halted = HALT_NO_RATE;
    } else if (report.bad_rank != NONE) {
        report.lr = rates[at].lr;
        if (update_scale(set, s, true))
            s.skipped_steps += 1;
        else
            s.halted = HALT_AT_MINIMUM;
    } else {
        double divisor = __dmul_rn(__dmul_rn(s.loss_scale, (double)ranks), (double)set.micro_batches);
        StepRates now = rates[at];
        report.lr = now.lr;
        report.grad_norm = __ddiv_rn(__dsqrt_rn(sum_sq), divisor);
        report.clip = 1.0;
        if (set.max_grad_norm > 0.0 && report.grad_norm > set.max_grad_norm)
            report.clip = __ddiv_rn(set.max_grad_norm, __dadd_rn(report.grad_norm, 1e-6));
        report.skipped = 0;
        u64 t = s.adam_steps + 1;
        scalars->grad_scale = (float)__ddiv_rn(report.clip, divisor);
        scalars->lr = (float)report.lr;
        scalars->step_size = (float)__ddiv_rn(report.lr, __dsub_rn(1.0, power(now.beta1, t)));
        scalars->bias_correction2_sqrt = (float)__dsqrt_rn(__dsub_rn(1.0, power(now.beta2, t)));
        scalars->one_minus_beta1 = (float)__dsub_rn(1.0, now.beta1);
        scalars->beta2 = (float)now.beta2;
        scalars->one_minus_beta2 = (float)__dsub_rn(1.0, now.beta2);
        scalars->skip = 0;
        update_scale(set, s, false);
        s.adam_steps += 1;
        s.schedule_position += 1;
    }
    report.next_loss_scale = s.loss_scale;
    report.halted = s.halted;
    reports[report.iteration % report_count] = report;
    *state = s;
}
