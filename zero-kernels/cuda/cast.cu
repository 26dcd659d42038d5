// dst[i] = src[i] * scale, multiplied in fp32, rounded to nearest even. Host version: src/host/cast.rs.
//
// cast_SRC_DST. Streams of `span.wide`: 0 src, 1 dst.

template <class S, class D>
__device__ __forceinline__ void cast(const S *src, D *dst, float scale, Span span) {
    FOR_EACH_TILE(span, tile) {
        S x[GROUP];
        D y[GROUP];
        load(src, span, tile, 0, x);
        trade(x);
#pragma unroll
        for (int i = 0; i < GROUP; i++) y[i] = narrow<D>(__fmul_rn(widen(x[i]), scale));
        trade(y);
        store(dst, span, tile, 1, y);
    }
}

#define CAST(S, D)                                                                                      \
    extern "C" __global__ __launch_bounds__(THREADS) void cast_##S##_##D(const S *src, D *dst,          \
                                                                         float scale, Span span) {      \
        cast(src, dst, scale, span);                                                                    \
    }

CAST(f32, f32)
CAST(f32, bf16)
CAST(f32, f16)
CAST(bf16, f32)
CAST(bf16, bf16)
CAST(bf16, f16)
CAST(f16, f32)
CAST(f16, bf16)
CAST(f16, f16)
