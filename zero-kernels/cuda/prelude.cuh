// The prelude of every kernel file, prepended at compile time, so no include path is needed.
//
// Types are named after zero-kernels' dtypes. 16-bit values are converted by PTX instructions or integer arithmetic,
// never by cuda_bf16.h or cuda_fp16.h, which many machines with a driver do not have. Everything is compiled with
// --fmad=false: a multiplication and an addition are fused exactly where the source has __fmaf_rn, as mul_add is on
// the host, so both compute the same bits.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

typedef float f32;
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

static_assert(sizeof(bf16) == 2 && sizeof(f16) == 2 && sizeof(u64) == 8, "as on the host");

// Threads per block of every elementwise kernel.
#define THREADS 256
#define WARP 32
// Elements per thread: 16 bytes of a 16-bit stream, 32 bytes of an fp32 stream.
#define GROUP 8
// Elements per warp.
#define TILE_ELEMS (WARP * GROUP)

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

// The weight of a parameter and its signed remainder, and back: `join` and `split` of src/codec.rs.
__device__ __forceinline__ float join(bf16 param, u16 remainder) {
    return __uint_as_float(((u32)param.bits << 16) + (u32)(int)(short)remainder);
}
__device__ __forceinline__ void split(float w, bf16 &param, u16 &remainder) {
    u32 bits = __float_as_uint(w);
    if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
    param.bits = (u16)((bits + 0x8000u) >> 16);
    remainder = (u16)bits;
}

// The partition of a flat range into tiles. `head` elements come before the first whole tile. Bit `s` of `wide` is
// set if stream `s` is aligned to 16 bytes at the start of every tile after the head. The host chooses `head` so that
// the aligned streams have the most bytes.
struct Span {
    u64 len;
    u32 head;
    u32 wide;
};

// Up to RANGES flat ranges of elements, passed by value, with the index of each one's first element, chunk or block.
#define RANGES 128
struct Range {
    const void *at;
    u64 len;
    u64 first;
};
struct Ranges {
    u64 count;
    Range of[RANGES];
};

// The last range with `first` <= `index`, or 0. The ranges ascend by `first`.
__device__ __forceinline__ u32 range_of(const Ranges &ranges, u64 index) {
    u32 low = 0, high = (u32)ranges.count;
    while (low + 1 < high) {
        u32 mid = (low + high) / 2;
        if (ranges.of[mid].first <= index) low = mid;
        else high = mid;
    }
    return low;
}

// The elements that a warp processes at once: the head, or up to TILE_ELEMS after it.
struct Tile {
    u64 start;
    u32 count;
};

__device__ __forceinline__ u64 tile_count(Span span) {
    return (span.head > 0) + (span.len - span.head + TILE_ELEMS - 1) / TILE_ELEMS;
}

__device__ __forceinline__ Tile tile_at(Span span, u64 index) {
    if (span.head > 0) {
        if (index == 0) return {0, span.head};
        index -= 1;
    }
    u64 start = span.head + index * TILE_ELEMS;
    u64 left = span.len - start;
    return {start, left < TILE_ELEMS ? (u32)left : TILE_ELEMS};
}

// The index within the tile of this thread's element `i` when a stream of T is loaded or stored. In a 16-bit stream a
// thread has 8 consecutive elements. In an fp32 stream it has two runs of 4, 8 apart, and its neighbour has the runs
// between, so that the 16-byte accesses of two threads fill whole 32-byte sectors. `trade` converts between the
// layouts.
template <class T> __device__ __forceinline__ u32 place(u32 i) {
    u32 lane = threadIdx.x % WARP;
    return sizeof(T) == 4 ? lane / 2 * 16 + lane % 2 * 4 + i / 4 * 8 + i % 4 : lane * GROUP + i;
}

// Whether the tile is accessed 16 bytes at a time in this stream; equal for all threads of a warp.
__device__ __forceinline__ bool is_wide(Span span, Tile tile, u32 stream) {
    return tile.count == TILE_ELEMS && (span.wide >> stream & 1u);
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

// One 16-byte access.
__device__ __forceinline__ void load_16(const f32 *p, f32 *x) {
    float4 q = *reinterpret_cast<const float4 *>(p);
    x[0] = q.x, x[1] = q.y, x[2] = q.z, x[3] = q.w;
}
__device__ __forceinline__ void store_16(f32 *p, const f32 *x) {
    *reinterpret_cast<float4 *>(p) = make_float4(x[0], x[1], x[2], x[3]);
}
__device__ __forceinline__ void load_16(const u16 *p, u16 *x) { unpack(*reinterpret_cast<const uint4 *>(p), x); }
__device__ __forceinline__ void store_16(u16 *p, const u16 *x) { *reinterpret_cast<uint4 *>(p) = pack(x); }
__device__ __forceinline__ void load_16(const bf16 *p, bf16 *x) { load_16(&p->bits, &x->bits); }
__device__ __forceinline__ void store_16(bf16 *p, const bf16 *x) { store_16(&p->bits, &x->bits); }
__device__ __forceinline__ void load_16(const f16 *p, f16 *x) { load_16(&p->bits, &x->bits); }
__device__ __forceinline__ void store_16(f16 *p, const f16 *x) { store_16(&p->bits, &x->bits); }

// 8 consecutive elements at `p`, which is aligned to 16 bytes.
template <class T> __device__ __forceinline__ void load_wide(const T *p, T *x) {
#pragma unroll
    for (u32 i = 0; i < GROUP; i += 16 / sizeof(T)) load_16(p + i, x + i);
}
template <class T> __device__ __forceinline__ void store_wide(T *p, const T *x) {
#pragma unroll
    for (u32 i = 0; i < GROUP; i += 16 / sizeof(T)) store_16(p + i, x + i);
}

// Loads a thread's elements of a tile of the stream `p`; elements at and after `count` keep their values.
template <class T>
__device__ __forceinline__ void load(const T *p, Span span, Tile tile, u32 stream, T (&x)[GROUP]) {
    p += tile.start;
    if (is_wide(span, tile, stream)) {
#pragma unroll
        for (u32 i = 0; i < GROUP; i += 16 / sizeof(T)) load_16(p + place<T>(i), x + i);
    } else {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            if (place<T>(i) < tile.count) x[i] = p[place<T>(i)];
    }
}

template <class T>
__device__ __forceinline__ void store(T *p, Span span, Tile tile, u32 stream, const T (&x)[GROUP]) {
    p += tile.start;
    if (is_wide(span, tile, stream)) {
#pragma unroll
        for (u32 i = 0; i < GROUP; i += 16 / sizeof(T)) store_16(p + place<T>(i), x + i);
    } else {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            if (place<T>(i) < tile.count) p[place<T>(i)] = x[i];
    }
}

// Converts between the layouts of a 16-bit and an fp32 stream: two neighbouring threads exchange half of their
// elements. All threads of a warp must call it. It waits for its operand's load, so it is called after all loads are
// issued.
__device__ __forceinline__ void trade(f32 (&)[GROUP]) {}
__device__ __forceinline__ void trade_halves(u16 *x) {
    uint4 q = pack(x);
    bool odd = threadIdx.x & 1;
    u32 a = __shfl_xor_sync(0xffffffffu, odd ? q.x : q.z, 1);
    u32 b = __shfl_xor_sync(0xffffffffu, odd ? q.y : q.w, 1);
    unpack(odd ? make_uint4(a, b, q.z, q.w) : make_uint4(q.x, q.y, a, b), x);
}
__device__ __forceinline__ void trade(u16 (&x)[GROUP]) { trade_halves(x); }
__device__ __forceinline__ void trade(bf16 (&x)[GROUP]) { trade_halves(&x->bits); }
__device__ __forceinline__ void trade(f16 (&x)[GROUP]) { trade_halves(&x->bits); }

// Runs the body for every tile of this warp; all threads of the warp run it together.
#define FOR_EACH_TILE(span, tile)                                                                             \
    for (u64 index_ = ((u64)blockIdx.x * THREADS + threadIdx.x) / WARP, count_ = tile_count(span);            \
         index_ < count_; index_ += (u64)gridDim.x * (THREADS / WARP))                                        \
        if (Tile tile = tile_at(span, index_); true)

// The scalars of a step's updates: the rule gives `of_rule` its meaning (`StepScalars` of the host).
#define RULE_SCALARS 6
struct StepScalars {
    float grad_scale;
    float of_rule[RULE_SCALARS];
    u32 skip;
};
