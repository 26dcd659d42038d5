// SwiGLU (arXiv 2002.05202): act = silu(gate) up, silu(x) = x s(x), s the logistic function. Host version:
// src/ops/swiglu.rs.
//
// Shapes in T: gate_up [rows, 2, n], act [rows, n]. A thread owns W columns (8: n is a multiple of 8; else 1). Grid: any.
// forward reads gate_up and writes act: 3 rows n sizeof(T) bytes. backward reads gate_up and the gradient of act, and
// replaces them by the gradients of gate and up and by act again, with the bits of forward: 6 rows n sizeof(T) bytes.

__device__ __forceinline__ float logistic(float z) { return 1.0f / (1.0f + exp2_fast(-LOG2_E * z)); }

// Calls `work(gate, up, act)` with the places of each thread's columns.
template <class T, int W, class Work>
__device__ __forceinline__ void for_each_place(T *act, T *gate_up, u32 rows, u32 n, Work work) {
    u32 groups = n / W;
    u64 count = (u64)rows * groups;
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        u64 row = i / groups, col = i % groups * W;
        T *gate = gate_up + row * 2 * n + col;
        work(gate, gate + n, act + row * n + col);
    }
}

template <class T, int W> __device__ __forceinline__ void forward(T *act, T *gate_up, u32 rows, u32 n) {
    for_each_place<T, W>(act, gate_up, rows, n, [](const T *gate, const T *up, T *act) {
        float x[W], y[W];
        load_columns<W>(gate, x), load_columns<W>(up, y);
#pragma unroll
        for (int k = 0; k < W; k++) y[k] *= x[k] * logistic(x[k]);
        store_columns<W>(act, y);
    });
}

template <class T, int W> __device__ __forceinline__ void backward(T *act, T *gate_up, u32 rows, u32 n) {
    for_each_place<T, W>(act, gate_up, rows, n, [](T *gate, T *up, T *act) {
        float x[W], y[W], d[W], z[W];
        load_columns<W>(gate, x), load_columns<W>(up, y), load_columns<W>(act, d);
#pragma unroll
        for (int k = 0; k < W; k++) {
            float s = logistic(x[k]), silu = x[k] * s;
            z[k] = y[k] * silu;
            x[k] = d[k] * y[k] * __fmaf_rn(silu, 1.0f - s, s);
            y[k] = d[k] * silu;
        }
        store_columns<W>(gate, x), store_columns<W>(up, y), store_columns<W>(act, z);
    });
}

#define SWIGLU(T, W)                                                                                                \
    extern "C" __global__ __launch_bounds__(THREADS) void swiglu_forward_##W(T *act, T *gate_up, u32 rows, u32 n) { \
        forward<T, W>(act, gate_up, rows, n);                                                                       \
    }                                                                                                               \
    extern "C" __global__ __launch_bounds__(THREADS) void swiglu_backward_##W(T *act, T *gate_up, u32 rows,         \
                                                                              u32 n) {                              \
        backward<T, W>(act, gate_up, rows, n);                                                                      \
    }

SWIGLU(STORAGE, 8)
SWIGLU(STORAGE, 1)
