// The residual addition behind a dropout. Host version: src/ops/dropout.rs. Other kernels draw the factors themselves.
//
// Shapes: y, residual [rows, n] in T, rows of [batch * seq, n] from `first_row` on. y = residual + y factors, without
// the residual if it is null, and without factors if `keys` is null. A thread owns W columns (8: n is a multiple of 8;
// else 1). Reads y and residual, writes y: 3 rows n sizeof(T) bytes. Grid: any.

template <class T, int W>
__device__ __forceinline__ void dropout_add(T *y, const T *residual, const u32 *keys, Dropout dropout, u32 rows,
                                            u32 first_row, u32 seq, u32 n) {
    u32 groups = n / W;
    u64 count = (u64)rows * groups;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        u32 row = (u32)(i / groups), col = (u32)(i % groups) * W;
        u64 at = (u64)row * n + col;
        float a[W], b[W] = {};
        load_columns<W>(y + at, a);
        if (residual) load_columns<W>(residual + at, b);
        drop_columns<W>(a, keys, dropout, first_row + row, seq, col);
#pragma unroll
        for (int k = 0; k < W; k++) a[k] += b[k];
        store_columns<W>(y + at, a);
    }
}

#define DROPOUT_ADD(T, W)                                                                                     \
    extern "C" __global__ __launch_bounds__(THREADS) void dropout_add_##W(                                    \
        T *y, const T *residual, const u32 *keys, Dropout dropout, u32 rows, u32 first_row, u32 seq, u32 n) { \
        dropout_add<T, W>(y, residual, keys, dropout, rows, first_row, seq, n);                               \
    }

DROPOUT_ADD(STORAGE, 8)
DROPOUT_ADD(STORAGE, 1)
