// What every kernel file starts with; it is put in front of each at compile time, so no include path is needed.
//
// Types have the names of zero-kernels' dtypes. 16-bit values are converted by PTX instructions or integer
// arithmetic, never through cuda_bf16.h or cuda_fp16.h, which many machines with a driver do not have.
// Everything is compiled with --fmad=false: a multiplication and an addition are fused exactly where the source
// says __fmaf_rn, as the host twins do with mul_add, so both give the same bits.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

typedef float f32;
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

static_assert(sizeof(bf16) == 2 && sizeof(f16) == 2 && sizeof(u64) == 8, "as on the host");

// Threads of a block, of every kernel that works element by element.
#define THREADS 256
// Elements of a thread: 16 bytes of a 16-bit stream, twice 16 bytes of an fp32 stream.
#define GROUP 8

__device__ __forceinline__ float widen(f32 x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Rounds to nearest, ties to even.
template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ f32 narrow<f32>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) {
    bf16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    u32 bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    y.bits = nan ? (u16)0x7fff : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
    return y;
}
template <> __device__ __forceinline__ f16 narrow<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// How a flat range is cut into groups. `head` elements come before the first whole group, so that as many streams
// as possible are aligned to 16 bytes at the groups' starts; bit `s` of `wide` says that stream `s` is.
struct Span {
    u64 len;
    u32 head;
    u32 wide;
};

// The elements of one group: those of the head, or up to GROUP behind it.
struct Group {
    u64 start;
    u32 count;
};

__device__ __forceinline__ u64 group_count(Span span) {
    return (span.head > 0) + (span.len - span.head + GROUP - 1) / GROUP;
}

__device__ __forceinline__ Group group_at(Span span, u64 index) {
    if (span.head > 0) {
        if (index == 0) return {0, span.head};
        index -= 1;
    }
    u64 start = span.head + index * GROUP;
    u64 left = span.len - start;
    return {start, left < GROUP ? (u32)left : GROUP};
}

__device__ __forceinline__ bool is_wide(Span span, Group group, u32 stream) {
    return group.count == GROUP && (span.wide >> stream & 1u);
}

__device__ __forceinline__ void unpack(uint4 q, u16 *x) {
    u32 words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = (u16)words[i];
        x[2 * i + 1] = (u16)(words[i] >> 16);
    }
}

__device__ __forceinline__ uint4 pack(const u16 *x) {
    uint4 q;
    q.x = x[0] | (u32)x[1] << 16;
    q.y = x[2] | (u32)x[3] << 16;
    q.z = x[4] | (u32)x[5] << 16;
    q.w = x[6] | (u32)x[7] << 16;
    return q;
}

// Eight 32-bit words by two 16-byte accesses.
__device__ __forceinline__ void load_wide(const f32 *p, f32 *x) {
    float4 a = reinterpret_cast<const float4 *>(p)[0], b = reinterpret_cast<const float4 *>(p)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
__device__ __forceinline__ void store_wide(f32 *p, const f32 *x) {
    reinterpret_cast<float4 *>(p)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4 *>(p)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// Eight 16-bit words by one 16-byte access.
__device__ __forceinline__ void load_wide(const u16 *p, u16 *x) { unpack(*reinterpret_cast<const uint4 *>(p), x); }
__device__ __forceinline__ void store_wide(u16 *p, const u16 *x) { *reinterpret_cast<uint4 *>(p) = pack(x); }
__device__ __forceinline__ void load_wide(const bf16 *p, bf16 *x) { load_wide(&p->bits, &x->bits); }
__device__ __forceinline__ void store_wide(bf16 *p, const bf16 *x) { store_wide(&p->bits, &x->bits); }
__device__ __forceinline__ void load_wide(const f16 *p, f16 *x) { load_wide(&p->bits, &x->bits); }
__device__ __forceinline__ void store_wide(f16 *p, const f16 *x) { store_wide(&p->bits, &x->bits); }

// One group of a stream, `p` being the whole stream: what lies behind `count` is left as it was.
template <class T>
__device__ __forceinline__ void load(const T *p, Span span, Group group, u32 stream, T (&x)[GROUP]) {
    p += group.start;
    if (is_wide(span, group, stream)) {
        load_wide(p, x);
    } else {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            if (i < group.count) x[i] = p[i];
    }
}

template <class T>
__device__ __forceinline__ void store(T *p, Span span, Group group, u32 stream, const T (&x)[GROUP]) {
    p += group.start;
    if (is_wide(span, group, stream)) {
        store_wide(p, x);
    } else {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            if (i < group.count) p[i] = x[i];
    }
}

// Runs `body` for every group of this thread.
#define FOR_EACH_GROUP(span, group)                                                                           \
    for (u64 index_ = (u64)blockIdx.x * THREADS + threadIdx.x, count_ = group_count(span); index_ < count_;   \
         index_ += (u64)gridDim.x * THREADS)                                                                  \
        if (Group group = group_at(span, index_); true)

// What every Adam launch of a step shares (`StepScalars` of the host).
struct StepScalars {
    float grad_scale;
    float lr;
    float step_size;
    float bias_correction2_sqrt;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    u32 skip;
};

// Constants of Adam, rounded to fp32 on the host.
struct AdamConstants {
    float eps;
    float weight_decay;
    u32 decoupled;
};

// One element of Adam: the same operations in the same order as `element` of src/host/adam.rs.
__device__ __forceinline__ void adam_element(StepScalars s, AdamConstants c, float keep, float &w, float &m, float &v,
                                             float g) {
    g = __fmul_rn(g, s.grad_scale);
    if (c.decoupled)
        w = __fmul_rn(w, keep);
    else
        g = __fmaf_rn(c.weight_decay, w, g);
    m = __fmaf_rn(s.one_minus_beta1, __fsub_rn(g, m), m);
    v = __fmaf_rn(__fmul_rn(s.one_minus_beta2, g), g, __fmul_rn(v, s.beta2));
    float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), s.bias_correction2_sqrt), c.eps);
    w = __fsub_rn(w, __fdiv_rn(__fmul_rn(s.step_size, m), denominator));
}

// What AdamW multiplies weights with: 1 - lr * weight_decay.
__device__ __forceinline__ float adam_keep(StepScalars s, AdamConstants c) {
    return __fsub_rn(1.0f, __fmul_rn(s.lr, c.weight_decay));
}

// 32 random bits that depend on the key and the element's number in the whole model only (host: src/random.rs).
__device__ __forceinline__ u32 mix(u32 x) {
    x = (x ^ (x >> 16)) * 0x21f0aaadu;
    x = (x ^ (x >> 15)) * 0xd35a2d97u;
    return x ^ (x >> 15);
}
__device__ __forceinline__ u32 random_bits(u64 key, u64 element) {
    return mix(mix((u32)element ^ (u32)key) ^ (u32)(element >> 32) ^ (u32)(key >> 32));
}

// Rounds to one of the two neighbours, up with the probability of the distance from the lower.
__device__ __forceinline__ bf16 narrow_stochastic(float x, u32 random) {
    u32 bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    bf16 y;
    y.bits = nan ? (u16)((bits >> 16) | 0x40u) : (u16)((bits + (random & 0xffffu)) >> 16);
    return y;
}
