// A dropout, and the residual addition behind it. Host version: src/ops/dropout.rs. Other kernels draw the factors
// themselves.
//
// Shapes: y, x, residual [rows, n] in T, rows of [batch * seq, n] from `first_row` on, whose first element is element
// `first_col` of its line. y = residual + x factors, without the residual if it is null, and without factors if `keys`
// is null; y may be x or the residual. A thread owns W columns (8: n and first_col are multiples of 8; else 1). Reads x
// and residual, writes y: 3 rows n sizeof(T) bytes. Grid: any.

template <class T, int W>
__device__ __forceinline__ void dropout_add(T *y, const T *x, const T *residual, const u32 *keys,
                                            Dropout dropout, u32 rows, u32 first_row, u32 seq, u32 n, u32 first_col) {
    u32 groups = n / W;
    u64 count = (u64)rows * groups;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        u32 row = (u32)(i / groups), col = (u32)(i % groups) * W;
        u64 at = (u64)row * n + col;
        float a[W], b[W] = {};
        load_columns<W>(x + at, a);
        if (residual) load_columns<W>(residual + at, b);
        drop_columns<W>(a, keys, dropout, first_row + row, seq, first_col + col);
#pragma unroll
        for (int k = 0; k < W; k++) a[k] += b[k];
        store_columns<W>(y + at, a);
    }
}

#define DROPOUT_ADD(T, W)                                                                                     \
    extern "C" __global__ __launch_bounds__(THREADS) void dropout_add_##W(                                    \
        T *y, const T *x, const T *residual, const u32 *keys, Dropout dropout, u32 rows, u32 first_row,       \
        u32 seq, u32 n, u32 first_col) {                                                                      \
        dropout_add<T, W>(y, x, residual, keys, dropout, rows, first_row, seq, n, first_col);                 \
    }

DROPOUT_ADD(STORAGE, 8)
DROPOUT_ADD(STORAGE, 1)
