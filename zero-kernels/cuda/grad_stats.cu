// Sum of squares in fp64 and count of non-finite elements, in two stages without atomics. The result does not depend
// on the grid and has the bits of the host version; src/host/grad_stats.rs documents the order of the sum. Each
// gradient element is read once; 12 bytes are written per 32768 elements. A launch of each stage serves up to RANGES gradients;
// `first` of a gradient is its first chunk.
//
// Stage 1, grad_stats_chunks_GRAD: one block per chunk, one warp per strip. Grid: the sum of ceil(len / CHUNK).
// Stage 2, grad_stats_combine: one block per gradient adds the sums of its chunks.

#define STRIPS (THREADS / WARP)
#define STRIP 4096
#define CHUNK 32768
// Tiles whose loads are in flight together.
#define BATCH 4

static_assert(CHUNK == STRIPS * STRIP && STRIP % (BATCH * TILE_ELEMS) == 0, "one block per chunk, one warp per strip");

struct GradStats {
    double sum_sq;
    u64 nonfinite;
};

// Adds the upper half to the lower half until one value is left.
template <class T> __device__ __forceinline__ T add_pairwise(T (&x)[GROUP]) {
#pragma unroll
    for (u32 half = GROUP / 2; half > 0; half /= 2)
#pragma unroll
        for (u32 i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

// Adds each square to its lane's sum; a non-finite element is counted and adds nothing. The square is exact in fp64,
// so fusing changes no bit.
template <class G> __device__ __forceinline__ void add_squares(const G (&g)[GROUP], double (&sums)[GROUP], u32 &bad) {
    // 0 if all elements are finite, else NaN.
    float zero = 0.0f;
#pragma unroll
    for (int i = 0; i < GROUP; i++) zero = __fmaf_rn(widen(g[i]), 0.0f, zero);
    if (zero == 0.0f) {
#pragma unroll
        for (int i = 0; i < GROUP; i++) sums[i] = __fma_rn((double)widen(g[i]), (double)widen(g[i]), sums[i]);
    } else {
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            float x = widen(g[i]);
            if ((__float_as_uint(x) & 0x7f800000u) == 0x7f800000u) bad++;
            else sums[i] = __fma_rn((double)x, (double)x, sums[i]);
        }
    }
}

template <class G>
__device__ __forceinline__ void chunk_stats(const Ranges &grads, double *sums, u32 *bad) {
    u32 nth = range_of(grads, blockIdx.x);
    const G *grad = (const G *)grads.of[nth].at;
    u64 len = grads.of[nth].len;
    u32 strip = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u64 start = (blockIdx.x - grads.of[nth].first) * CHUNK + strip * STRIP;
    double lanes[GROUP] = {};
    u32 count = 0;
    if (start + STRIP <= len && (u64)grad % 16 == 0) {
#pragma unroll 1
        for (u64 at = start; at < start + STRIP; at += BATCH * TILE_ELEMS) {
            G g[BATCH][GROUP];
#pragma unroll
            for (int i = 0; i < BATCH; i++) load_wide(grad + at + i * TILE_ELEMS + lane * GROUP, g[i]);
#pragma unroll
            for (int i = 0; i < BATCH; i++) add_squares(g[i], lanes, count);
        }
    } else {
        for (u64 at = start + lane * GROUP; at < start + STRIP && at < len; at += TILE_ELEMS) {
            G g[GROUP] = {};
#pragma unroll
            for (int i = 0; i < GROUP; i++)
                if (at + i < len) g[i] = grad[at + i];
            add_squares(g, lanes, count);
        }
    }
    double sum = add_pairwise(lanes);
#pragma unroll
    for (u32 half = WARP / 2; half > 0; half /= 2) {
        sum += __shfl_down_sync(0xffffffffu, sum, half);
        count += __shfl_down_sync(0xffffffffu, count, half);
    }

    __shared__ double strip_sums[STRIPS];
    __shared__ u32 strip_bad[STRIPS];
    static_assert(STRIPS == GROUP, "added by the same function");
    if (lane == 0) strip_sums[strip] = sum, strip_bad[strip] = count;
    __syncthreads();
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = add_pairwise(strip_sums);
        bad[blockIdx.x] = add_pairwise(strip_bad);
    }
}

#define CHUNK_STATS(G)                                                                                      \
    extern "C" __global__ __launch_bounds__(THREADS) void grad_stats_chunks_##G(                            \
        const __grid_constant__ Ranges grads, double *sums, u32 *bad) {                                     \
        chunk_stats<G>(grads, sums, bad);                                                                   \
    }

CHUNK_STATS(f32)
CHUNK_STATS(bf16)
CHUNK_STATS(f16)

extern "C" __global__ __launch_bounds__(THREADS) void grad_stats_combine(const __grid_constant__ Ranges grads,
                                                                         const double *sums, const u32 *bad,
                                                                         GradStats *out) {
    sums += grads.of[blockIdx.x].first;
    bad += grads.of[blockIdx.x].first;
    u64 chunks = (grads.of[blockIdx.x].len + CHUNK - 1) / CHUNK;
    __shared__ double lane_sums[THREADS];
    __shared__ u64 lane_bad[THREADS];
    u32 lane = threadIdx.x;
    double sum = 0.0;
    u64 count = 0;
    // Loads of several chunks are in flight together; missing chunks are 0.
    for (u64 first = lane; first < chunks; first += THREADS * GROUP) {
        double of_chunk[GROUP];
        u32 bad_of_chunk[GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            u64 chunk = first + i * THREADS;
            of_chunk[i] = chunk < chunks ? sums[chunk] : 0.0;
            bad_of_chunk[i] = chunk < chunks ? bad[chunk] : 0;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) sum += of_chunk[i], count += bad_of_chunk[i];
    }
    lane_sums[lane] = sum;
    lane_bad[lane] = count;
    __syncthreads();
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        if (lane < half) {
            lane_sums[lane] += lane_sums[lane + half];
            lane_bad[lane] += lane_bad[lane + half];
        }
        __syncthreads();
    }
    if (lane == 0) out[blockIdx.x] = {lane_sums[0], lane_bad[0]};
}
