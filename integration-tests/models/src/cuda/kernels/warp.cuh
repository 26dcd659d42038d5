// Helpers of the transformer's kernels, in addition to zero-kernels' prelude: sums over warps, and the columns
// of a thread.
//
// Each file is compiled once for every type of storage, STORAGE: f32, bf16 or f16. Arithmetic is always in fp32. The
// order of every sum depends only on the sizes.

#define ALL_LANES 0xffffffffu

// The maximum of no scores, of which none is smaller. Unlike -inf it can be subtracted from itself.
#define NO_PEAK -1e38f

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// 2^x by the special function unit, within 2 ulp; 0 for -inf.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) x += __shfl_xor_sync(ALL_LANES, x, half);
    return x;
}

// Loads W neighbouring elements of a row, widened to fp32. W is 8, for rows that allow 16-byte accesses, or 1.
template <int W, class T> __device__ __forceinline__ void load_columns(const T *p, float (&x)[W]) {
    if constexpr (W == 8) {
        T raw[8];
        load_wide(p, raw);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = widen(raw[i]);
    } else {
        x[0] = widen(*p);
    }
}

template <int W, class T> __device__ __forceinline__ void store_columns(T *p, const float (&x)[W]) {
    if constexpr (W == 8) {
        T raw[8];
#pragma unroll
        for (int i = 0; i < 8; i++) raw[i] = narrow<T>(x[i]);
        store_wide(p, raw);
    } else {
        *p = narrow<T>(x[0]);
    }
}

// W neighbouring elements of a row for a later use. 16-bit elements stay packed until then, in half of the registers.
template <class T, int W, bool PACKED = W == 8 && sizeof(T) == 2> struct Columns {
    float x[W];
    __device__ __forceinline__ void load(const T *p) { load_columns<W>(p, x); }
    __device__ __forceinline__ void widen_to(float (&y)[W]) const {
#pragma unroll
        for (int i = 0; i < W; i++) y[i] = x[i];
    }
};
template <class T> struct Columns<T, 8, true> {
    uint4 x;
    __device__ __forceinline__ void load(const T *p) { x = *reinterpret_cast<const uint4 *>(p); }
    __device__ __forceinline__ void widen_to(float (&y)[8]) const {
        T raw[8];
        unpack(x, &raw->bits);
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = widen(raw[i]);
    }
};
