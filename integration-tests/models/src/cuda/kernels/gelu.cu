// GELU in its tanh form: x s(2u), u = sqrt(2 / pi) (x + 0.044715 x^3), s the logistic function.
// Host version: src/ops/activation.rs. Used where cuBLASLt cannot fuse GELU into the product.
//
// Elementwise over flat ranges, 8 elements per thread. Streams (bits of `span.wide`): 0 x, 1 y or dy. Grid: any.
// forward reads x and writes y: 2 n sizeof(T) bytes. backward reads x and dy and writes dy: 3 n sizeof(T) bytes.

#define TWO_SQRT_2_OVER_PI 1.5957691216057308f
#define CUBIC 0.044715f

__device__ __forceinline__ float logistic(float z) { return 1.0f / (1.0f + exp2_fast(-LOG2_E * z)); }

template <class T> __device__ __forceinline__ void forward(T *y, const T *x, Span span) {
    FOR_EACH_TILE(span, tile) {
        T a[GROUP], b[GROUP];
        load(x, span, tile, 0, a);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            float v = widen(a[i]);
            b[i] = narrow<T>(v * logistic(TWO_SQRT_2_OVER_PI * (v + CUBIC * v * v * v)));
        }
        store(y, span, tile, 1, b);
    }
}

template <class T> __device__ __forceinline__ void backward(T *dy, const T *x, Span span) {
    FOR_EACH_TILE(span, tile) {
        T a[GROUP], b[GROUP];
        load(x, span, tile, 0, a);
        load(dy, span, tile, 1, b);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            float v = widen(a[i]);
            float s = logistic(TWO_SQRT_2_OVER_PI * (v + CUBIC * v * v * v));
            float slope = TWO_SQRT_2_OVER_PI * (1.0f + 3.0f * CUBIC * v * v);
            b[i] = narrow<T>(widen(b[i]) * (s + v * s * (1.0f - s) * slope));
        }
        store(dy, span, tile, 1, b);
    }
}

extern "C" __global__ __launch_bounds__(THREADS) void gelu_forward(STORAGE *y, const STORAGE *x, Span span) {
    forward<STORAGE>(y, x, span);
}

extern "C" __global__ __launch_bounds__(THREADS) void gelu_backward(STORAGE *dy, const STORAGE *x, Span span) {
    backward<STORAGE>(dy, x, span);
}
