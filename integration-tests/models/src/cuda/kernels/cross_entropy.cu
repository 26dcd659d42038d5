// Cross entropy of logits: the loss and its gradient, in place. Host version: src/ops/cross_entropy.rs.
//
// Shapes: logits [rows, stride] in T, with `vocab` valid columns; targets, losses [rows]. The gradient of the other
// columns is 0, so that matrix products can use whole rows.
//
// cross_entropy: losses[row] = -log softmax(logits)[target] in nats; logits become their gradient times loss_scale[0]
// / divisor[0], or stay as they are if loss_scale is null. A target of IGNORED has no loss and no gradient. One block per row; rows are aligned to 16 bytes. The first sweep
// computes the maximum and the sum (running maximum, rescaled sum: Milakov and Gimelshein, arXiv 1805.02867). The
// second sweep goes backwards. It reads the end of the row from the level-1 cache and the rest from the level-2 cache,
// which must hold the rows of all running blocks: hence two large blocks per multiprocessor, not four small ones. Moves
// 2 rows vocab sizeof(T) bytes of memory. Grid: rows.
// part_statistics and part_gradient: the same for a rank that has the logits of the tokens first .. first + vocab of a
// vocabulary. The first writes stats[row] = {maximum, sum of e^(x - maximum), logit of the target, or -inf if another
// rank has it}; the second reads stats [ranks, rows] of all ranks, combines them in rank order and, unless loss_scale
// is null, writes the gradient. Each moves rows vocab sizeof(T) bytes, the second twice that. Grid: rows.
// add_losses: loss += sum of losses / divisor[0], or the sum if divisor is null, in fp64, in an order that depends only on `rows`. Grid: one block.

#define CE_THREADS 1024
// The target of a token that is not trained.
#define IGNORED 0xffffffffu
// One per lane of a warp, so that one warp merges the results of all warps.
#define CE_WARPS 32
static_assert(CE_THREADS == 32 * CE_WARPS, "as above");

// The maximum, and the sum of e^(x - max), over the elements that a thread, warp or block has read. Exponentials are
// computed in base 2, so that each is one fused multiply-add and one instruction.
struct Running {
    float max;
    float sum;
};

// e^(x - max), with `off` = -max log2 e.
__device__ __forceinline__ float power(float x, float off) { return exp2_fast(__fmaf_rn(x, LOG2_E, off)); }

__device__ __forceinline__ Running merge(Running a, Running b) {
    float max = fmaxf(a.max, b.max);
    // Before the first element both maxima are -inf, and -inf - -inf is NaN.
    if (max == minus_infinity()) return {max, 0.0f};
    return {max, a.sum * exp2_fast((a.max - max) * LOG2_E) + b.sum * exp2_fast((b.max - max) * LOG2_E)};
}

// Merges the lanes of a warp. All lanes receive the result.
__device__ __forceinline__ Running merge_over_warp(Running seen) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) {
        Running other = {__shfl_xor_sync(ALL_LANES, seen.max, half), __shfl_xor_sync(ALL_LANES, seen.sum, half)};
        // The lower lane's value is the first operand, so that both lanes compute the same bits.
        seen = threadIdx.x & half ? merge(other, seen) : merge(seen, other);
    }
    return seen;
}

// The maximum and the sum over a row of `vocab` elements. All threads receive the result.
template <class T>
__device__ __forceinline__ Running of_row(const T *row, u32 vocab, Running *of_warps) {
    u32 whole = vocab / 8 * 8;
    Running seen = {minus_infinity(), 0.0f};
    for (u32 col = threadIdx.x * 8; col < whole; col += CE_THREADS * 8) {
        float x[8];
        load_columns<8>(row + col, x);
        float max = seen.max;
#pragma unroll
        for (int i = 0; i < 8; i++) max = fmaxf(max, x[i]);
        float off = -max * LOG2_E, sum = seen.sum * power(seen.max, off);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += power(x[i], off);
        seen = {max, sum};
    }
    if (whole + threadIdx.x < vocab) seen = merge(seen, {widen(row[whole + threadIdx.x]), 1.0f});
    seen = merge_over_warp(seen);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = seen;
    // Also orders every thread's read of the target's logit before its write.
    __syncthreads();
    return merge_over_warp(of_warps[threadIdx.x % 32]);
}

// Writes the gradient of a row: e^(x - max) times scale / sum, less scale at the target.
template <class T>
__device__ __forceinline__ void write_gradient(T *row, Running seen, u32 target, float scale, u32 vocab, u64 stride) {
    u32 whole = vocab / 8 * 8;
    float factor = scale / seen.sum, off = -seen.max * LOG2_E;
    // Backwards: the first sweep read the end last, so that the nearest caches have it.
    for (u32 step = (whole + CE_THREADS * 8 - 1) / (CE_THREADS * 8); step-- > 0;) {
        u32 col = (step * CE_THREADS + threadIdx.x) * 8;
        if (col >= whole) continue;
        float x[8];
        load_columns<8>(row + col, x);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = power(x[i], off) * factor;
        // Only one group of a row has the target.
        if (target - col < 8) {
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] -= col + i == target ? scale : 0.0f;
        }
        store_columns<8>(row + col, x);
    }
    u32 col = whole + threadIdx.x;
    if (col < vocab) {
        row[col] = narrow<T>(power(widen(row[col]), off) * factor - (col == target ? scale : 0.0f));
    }
    for (col = vocab + threadIdx.x; col < stride; col += CE_THREADS) row[col] = narrow<T>(0.0f);
}

template <class T>
__device__ __forceinline__ void cross_entropy(T *logits, float *losses, const u32 *targets, u32 vocab, u64 stride,
                                              bool gradient, float scale) {
    __shared__ Running of_warps[CE_WARPS];
    T *row = logits + blockIdx.x * stride;
    u32 target = targets[blockIdx.x];
    bool trained = target != IGNORED;
    float at_target = trained ? widen(row[target]) : 0.0f;
    Running seen = of_row(row, vocab, of_warps);
    if (threadIdx.x == 0) losses[blockIdx.x] = trained ? (seen.max - at_target) + logf(seen.sum) : 0.0f;
    if (gradient) write_gradient(row, seen, target, trained ? scale : 0.0f, vocab, stride);
}

// The statistics of a row that ranks exchange.
struct Part {
    float max;
    float sum;
    float at_target;
};

extern "C" __global__ __launch_bounds__(CE_THREADS) void part_statistics(Part *stats, const STORAGE *logits,
                                                                         const u32 *targets, u32 first, u32 vocab,
                                                                         u64 stride) {
    __shared__ Running of_warps[CE_WARPS];
    const STORAGE *row = logits + blockIdx.x * stride;
    u32 target = targets[blockIdx.x];
    // Wraps for the targets of parts before this one.
    bool is_here = target != IGNORED && target - first < vocab;
    Running seen = of_row(row, vocab, of_warps);
    if (threadIdx.x == 0) {
        stats[blockIdx.x] = {seen.max, seen.sum, is_here ? widen(row[target - first]) : minus_infinity()};
    }
}

extern "C" __global__ __launch_bounds__(CE_THREADS) void part_gradient(STORAGE *logits, float *losses,
                                                                       const Part *stats, const u32 *targets,
                                                                       u32 ranks, u32 rows, u32 first, u32 vocab,
                                                                       u64 stride, const double *loss_scale,
                                                                       const double *divisor) {
    u32 target = targets[blockIdx.x];
    bool trained = target != IGNORED;
    Running seen = {minus_infinity(), 0.0f};
    float at_target = minus_infinity();
    for (u32 rank = 0; rank < ranks; rank++) {
        Part part = stats[(u64)rank * rows + blockIdx.x];
        seen = merge(seen, {part.max, part.sum});
        at_target = fmaxf(at_target, part.at_target);
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = trained ? (seen.max - at_target) + logf(seen.sum) : 0.0f;
    if (!loss_scale) return;
    float scale = trained ? __fdiv_rn((float)*loss_scale, (float)*divisor) : 0.0f;
    write_gradient(logits + blockIdx.x * stride, seen, target - first, scale, vocab, stride);
}

extern "C" __global__ __launch_bounds__(CE_THREADS) void cross_entropy(STORAGE *logits, float *losses,
                                                                       const u32 *targets, u32 vocab, u64 stride,
                                                                       const double *loss_scale, const double *divisor) {
    float scale = loss_scale ? __fdiv_rn((float)*loss_scale, (float)*divisor) : 0.0f;
    cross_entropy<STORAGE>(logits, losses, targets, vocab, stride, loss_scale != nullptr, scale);
}

extern "C" __global__ __launch_bounds__(1024) void add_losses(double *loss, const float *losses, u32 rows,
                                                                 const double *divisor) {
    __shared__ double sums[1024];
    double sum = 0.0;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < rows; i += 1024) sum += losses[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = 512; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *loss += divisor ? sums[0] / *divisor : sums[0];
}
