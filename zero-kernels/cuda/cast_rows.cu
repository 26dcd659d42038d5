// As cast.cu, for the rows of a matrix: dst[r * dst_stride + c] = src[r * src_stride + c] * scale. Host version:
// src/host/launch.rs.
//
// cast_rows_SRC_DST. A thread has GROUP elements of a row. Grid: any number of blocks.

template <class S, class D>
__device__ __forceinline__ void cast_rows(const S *src, D *dst, float scale, u64 rows, u64 cols, u64 src_stride,
                                          u64 dst_stride) {
    u64 groups = (cols + GROUP - 1) / GROUP;
    for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < groups * rows; at += (u64)gridDim.x * THREADS) {
        u64 row = at / groups, first = at % groups * GROUP;
        const S *from = src + row * src_stride + first;
        D *to = dst + row * dst_stride + first;
        if (first + GROUP <= cols && ((u64)from | (u64)to) % 16 == 0) {
            S x[GROUP];
            D y[GROUP];
            load_wide(from, x);
#pragma unroll
            for (int i = 0; i < GROUP; i++) y[i] = narrow<D>(__fmul_rn(widen(x[i]), scale));
            store_wide(to, y);
        } else {
            for (u32 i = 0; i < GROUP && first + i < cols; i++) to[i] = narrow<D>(__fmul_rn(widen(from[i]), scale));
        }
    }
}

#define CAST_ROWS(S, D)                                                                                       \
    extern "C" __global__ __launch_bounds__(THREADS) void cast_rows_##S##_##D(                                \
        const S *src, D *dst, float scale, u64 rows, u64 cols, u64 src_stride, u64 dst_stride) {              \
        cast_rows(src, dst, scale, rows, cols, src_stride, dst_stride);                                       \
    }

CAST_ROWS(f32, f32)
CAST_ROWS(f32, bf16)
CAST_ROWS(f32, f16)
CAST_ROWS(bf16, f32)
CAST_ROWS(bf16, bf16)
CAST_ROWS(bf16, f16)
CAST_ROWS(f16, f32)
CAST_ROWS(f16, bf16)
CAST_ROWS(f16, f16)
