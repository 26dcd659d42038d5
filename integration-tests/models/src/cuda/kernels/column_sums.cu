// Sums over rows, in two stages with a fixed order: the gradient of a bias.
//
// column_sums: sums x [rows, n] in T into partials [gridDim.y, n] in fp32. A block owns 32 W neighbouring columns of
// a chunk of rows, a lane W of them, a warp every WARPS-th row. Grid: (ceil(n / (32 W)), chunks). Reads rows n
// sizeof(T) bytes.
// dropout_sums: multiplies x by the factors of a dropout first, for rows of [batch * seq, n] from `first_row` on, and
// writes that to y: reads x and writes y, 2 rows n sizeof(T) bytes.
// sum_partials: sums partials [blocks, outputs n] over the blocks; the sums of columns i n..i n + n go to output i [n].
// A lane owns a column, a warp every WARPS-th partial. Grid: ceil(outputs n / 32) blocks of WARPS warps.

#define WARPS 8

// Adds the sums of this block's warps in the order of the warps. Warp 0 receives the totals.
template <int W> __device__ __forceinline__ void sum_over_warps(float (&sum)[W]) {
    __shared__ float sums[WARPS][32 * W];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < W; i++) sums[warp][i * 32 + lane] = sum[i];
    __syncthreads();
    if (warp != 0) return;
#pragma unroll
    for (int i = 0; i < W; i++) {
        sum[i] = sums[0][i * 32 + lane];
#pragma unroll
        for (int w = 1; w < WARPS; w++) sum[i] += sums[w][i * 32 + lane];
    }
}

// Calls `load(row, col, v)` for the rows of this block and this lane's columns, and stores the sums of `v`.
template <int W, int UNROLL, class Load>
__device__ __forceinline__ void sum_columns(float *partials, u32 rows, u32 n, Load load) {
    u32 col = (blockIdx.x * 32 + threadIdx.x % 32) * W, warp = threadIdx.x / 32;
    u32 chunk = (rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * chunk;
    u32 end = first + chunk < rows ? first + chunk : rows;
    float sum[W] = {};
    if (col < n) {
#pragma unroll UNROLL
        for (u32 row = first + warp; row < end; row += WARPS) {
            float v[W];
            load(row, col, v);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += v[i];
        }
    }
    sum_over_warps<W>(sum);
    if (warp != 0 || col >= n) return;
#pragma unroll
    for (int i = 0; i < W; i++) partials[(u64)blockIdx.y * n + col + i] = sum[i];
}

#define COLUMN_SUMS(T, W)                                                                                     \
    extern "C" __global__ __launch_bounds__(32 * WARPS) void column_sums_##W(float *partials,                  \
                                                                             const T *x, u32 rows, u32 n) { \
        sum_columns<W, 4>(partials, rows, n, [&](u32 row, u32 col, float (&v)[W]) {                           \
            load_columns<W>(x + (u64)row * n + col, v);                                                       \
        });                                                                                                   \
    }                                                                                                         \
    extern "C" __global__ __launch_bounds__(32 * WARPS) void dropout_sums_##W(                                \
        float *partials, T *y, const T *x, const u32 *keys, Dropout dropout, u32 rows, u32 first_row,         \
        u32 seq, u32 n) {                                                                                     \
        sum_columns<W, 1>(partials, rows, n, [&](u32 row, u32 col, float (&v)[W]) {                           \
            load_columns<W>(x + (u64)row * n + col, v);                                                       \
            drop_columns<W>(v, keys, dropout, first_row + row, seq, col);                                     \
            store_columns<W>(y + (u64)row * n + col, v);                                                      \
        });                                                                                                   \
    }

COLUMN_SUMS(STORAGE, 8)
COLUMN_SUMS(STORAGE, 1)

// The kind of an output, byte i of `kinds` for output i: fp32 sums to which this one is added, or the type in which
// it is stored, rounded once.
#define SUM_ADD 0
#define SUM_F32 1
#define SUM_BF16 2
#define SUM_F16 3

__device__ __forceinline__ void store_sum(void *place, u32 kind, u32 i, float sum) {
    if (kind == SUM_ADD) static_cast<float *>(place)[i] += sum;
    if (kind == SUM_F32) static_cast<float *>(place)[i] = sum;
    if (kind == SUM_BF16) static_cast<bf16 *>(place)[i] = narrow<bf16>(sum);
    if (kind == SUM_F16) static_cast<f16 *>(place)[i] = narrow<f16>(sum);
}

extern "C" __global__ __launch_bounds__(32 * WARPS) void sum_partials(void *first, void *second, void *third,
                                                                      u32 kinds, const float *partials, u32 blocks,
                                                                      u32 outputs, u32 n) {
    u32 col = blockIdx.x * 32 + threadIdx.x % 32, warp = threadIdx.x / 32, columns = outputs * n;
    float sum[1] = {};
    if (col < columns) {
#pragma unroll 8
        for (u32 block = warp; block < blocks; block += WARPS) sum[0] += partials[(u64)block * columns + col];
    }
    sum_over_warps<1>(sum);
    if (warp != 0 || col >= columns) return;
    u32 output = col / n;
    store_sum(output == 0 ? first : output == 1 ? second : third, kinds >> 8 * output & 0xff, col % n, sum[0]);
}
