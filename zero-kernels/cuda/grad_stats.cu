// Sum of squares in fp64 and count of non-finite elements, in two stages, with the bits of the host twin
// (src/host/grad_stats.rs, where the order of the sum is described): no atomics, no dependence on the grid.
//
// Stage 1, grad_stats_chunks_GRAD: 16 lanes a chunk of 4096 elements, 16 chunks a block. Grid: ceil(chunks / 16).
// Stage 2, grad_stats_combine: one block adds the chunks' sums up.

#define CHUNK 4096
#define LANES 16
#define CHUNKS_PER_BLOCK (THREADS / LANES)

struct GradStats {
    double sum_sq;
    u64 nonfinite;
};

template <class G>
__device__ __forceinline__ void chunk_stats(const G *grad, u64 len, double *sums, u32 *bad) {
    u32 lane = threadIdx.x % LANES;
    u64 chunk = (u64)blockIdx.x * CHUNKS_PER_BLOCK + threadIdx.x / LANES;
    u64 start = chunk * CHUNK;
    u64 end = start + CHUNK < len ? start + CHUNK : len;
    double sum = 0.0;
    u32 count = 0;
#pragma unroll 16
    for (u64 i = start + lane; i < end; i += LANES) {
        float g = widen(grad[i]);
        bool finite = (__float_as_uint(g) & 0x7f800000u) != 0x7f800000u;
        double x = finite ? (double)g : 0.0;
        // The product is exact, so that fusing would change nothing.
        sum = __dadd_rn(sum, __dmul_rn(x, x));
        count += !finite;
    }
#pragma unroll
    for (u32 half = LANES / 2; half > 0; half /= 2) {
        sum = __dadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, half, LANES));
        count += __shfl_down_sync(0xffffffffu, count, half, LANES);
    }
    if (lane == 0 && start < len) {
        sums[chunk] = sum;
        bad[chunk] = count;
    }
}

#define CHUNK_STATS(G)                                                                                      \
    extern "C" __global__ __launch_bounds__(THREADS) void grad_stats_chunks_##G(const G *grad, u64 len,     \
                                                                                double *sums, u32 *bad) {   \
        chunk_stats(grad, len, sums, bad);                                                                  \
    }

CHUNK_STATS(f32)
CHUNK_STATS(bf16)
CHUNK_STATS(f16)

extern "C" __global__ __launch_bounds__(THREADS) void grad_stats_combine(const double *sums, const u32 *bad,
                                                                         u64 chunks, GradStats *out) {
    __shared__ double lane_sums[THREADS];
    __shared__ u64 lane_bad[THREADS];
    u32 lane = threadIdx.x;
    double sum = 0.0;
    u64 count = 0;
    for (u64 i = lane; i < chunks; i += THREADS) {
        sum = __dadd_rn(sum, sums[i]);
        count += bad[i];
    }
    lane_sums[lane] = sum;
    lane_bad[lane] = count;
    __syncthreads();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (lane < half) {
            lane_sums[lane] = __dadd_rn(lane_sums[lane], lane_sums[lane + half]);
            lane_bad[lane] += lane_bad[lane + half];
        }
        __syncthreads();
    }
    if (lane == 0) *out = {lane_sums[0], lane_bad[0]};
}
