// Tiles of 16-bit elements in shared memory, and matrix products of them on tensor cores: mma.sync m16n8k16 with fp32
// sums (sm_80 or later).
//
// A tile has rows of D elements in chunks of 16 bytes. Chunk c of row r is stored at c ^ twist(r), so that the eight
// rows of an ldmatrix, and the rows to which a warp writes fragments, are in different banks.

#define DEVICE __device__ __forceinline__

template <int D> DEVICE u32 place_in_tile(u32 row, u32 chunk) {
    constexpr u32 CHUNKS = D / 8;
    static_assert(CHUNKS == 4 || CHUNKS % 8 == 0, "head dimensions 32 and multiples of 64");
    u32 twist = CHUNKS == 4 ? row / 2 % 4 : row % 8;
    return row * D + (chunk ^ twist) * 8;
}

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Copies 16 bytes from global to shared memory, asynchronously and without registers.
DEVICE void copy_chunk(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
DEVICE void copy_word(float *shared, const float *global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
DEVICE void copies_are_one_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all copies of this thread except its newest `NEWEST` groups are complete.
template <int NEWEST> DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory");
}

// Starts copying ROWS rows of D elements, `stride` elements apart, from row `first` on, with all threads of WARPS
// warps. Rows behind the last, `rows` - 1, are copies of it; results from them are masked or not stored.
template <int D, int ROWS, int WARPS, class T>
DEVICE void copy_tile(T *tile, const T *source, u32 first, u32 rows, u32 stride) {
    constexpr u32 CHUNKS = D / 8, AT_ONCE = 32 * WARPS / CHUNKS;
    // This keeps a thread's chunk and its twist the same for all of its rows.
    static_assert(AT_ONCE % 8 == 0 && ROWS % AT_ONCE == 0, "whole rows, all twists at once");
    u32 row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    tile += place_in_tile<D>(row, chunk), source += chunk * 8;
#pragma unroll
    for (u32 done = 0; done < ROWS; done += AT_ONCE)
        copy_chunk(tile + done * D, source + (u64)min(first + row + done, rows - 1) * stride);
}

// Loads four 8 x 8 matrices. Lane l passes the address of row l % 8 of matrix l / 8.
DEVICE void load_matrices(u32 (&x)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void load_matrices_transposed(u32 (&x)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Loads rows row..row+16, columns 16 k..16 k+16 of a tile as the left operand of a product.
template <int D, class T> DEVICE void load_left(u32 (&a)[4], const T *tile, u32 row, u32 k) {
    u32 lane = threadIdx.x % 32;
    load_matrices(a, tile + place_in_tile<D>(row + lane % 16, 2 * k + lane / 16));
}
// Loads the right operand X^T, where X is rows row..row+16 and columns 16 k..16 k+16: b[0], b[1] for the first 8
// rows, b[2], b[3] for the others.
template <int D, class T> DEVICE void load_right_of_rows(u32 (&b)[4], const T *tile, u32 row, u32 k) {
    u32 lane = threadIdx.x % 32;
    load_matrices(b, tile + place_in_tile<D>(row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
}
// Loads the right operand X, rows row..row+16 and columns 16 k..16 k+16: b[0], b[1] for the first 8 columns, b[2],
// b[3] for the others.
template <int D, class T> DEVICE void load_right(u32 (&b)[4], const T *tile, u32 row, u32 k) {
    u32 lane = threadIdx.x % 32;
    load_matrices_transposed(b, tile + place_in_tile<D>(row + lane % 16, 2 * k + lane / 16));
}

// c += a b: a 16 x 16, b 16 x 8, c 16 x 8. Lane l holds columns 2 (l % 4) and 2 (l % 4) + 1 of c, in rows l / 4
// (c[0], c[1]) and l / 4 + 8 (c[2], c[3]).
template <class T> DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <> DEVICE void multiply<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DEVICE void multiply<f16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Packs two neighbouring elements into one register, the first in the low half.
template <class T> DEVICE u32 pack_pair(float first, float second);
template <> DEVICE u32 pack_pair<bf16>(float first, float second) {
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}
template <> DEVICE u32 pack_pair<f16>(float first, float second) {
    u32 x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
    return x;
}

// Converts columns 16 k..16 k+16 of sums to the left operand of the next product. No shuffle is needed: each lane
// holds the elements that it needs.
template <class T, int N> DEVICE void left_of_sums(u32 (&a)[4], const float (&c)[N][4], int k) {
    a[0] = pack_pair<T>(c[2 * k][0], c[2 * k][1]);
    a[1] = pack_pair<T>(c[2 * k][2], c[2 * k][3]);
    a[2] = pack_pair<T>(c[2 * k + 1][0], c[2 * k + 1][1]);
    a[3] = pack_pair<T>(c[2 * k + 1][2], c[2 * k + 1][3]);
}

// The angles by which rows were rotated, or a null `table`; `starts` as in attention.cu.
struct Angles {
    const float *table;
    const u32 *starts;
};

// Rotates a chunk of a row by minus its position's angles. `other` is the chunk with the other coordinates of its pairs.
template <int D, class T> DEVICE uint4 rotate_back(uint4 stored, uint4 other, u32 chunk, u32 row, Angles angles) {
    constexpr u32 HALF = D / 16;
    u32 position = angles.starts ? row - angles.starts[row] : row;
    const float *cos = angles.table + (u64)position * D + chunk % HALF * 8;
    float c[8], s[8], sign = chunk < HALF ? 1.0f : -1.0f;
    load_columns<8>(cos, c), load_columns<8>(cos + D / 2, s);
    T a[8], b[8];
    unpack(stored, &a->bits), unpack(other, &b->bits);
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = widen(a[e]) * c[e] + sign * widen(b[e]) * s[e];
    return {pack_pair<T>(x[0], x[1]), pack_pair<T>(x[2], x[3]), pack_pair<T>(x[4], x[5]), pack_pair<T>(x[6], x[7])};
}

// Stores a warp's 16 rows of sums, times `factor` of the lane's two rows. They pass through the warp's rows of a tile
// in shared memory, which no other warp may still read. Row r of the tile is stored to row `first` + r of `out` if
// that is less than `rows`, rotated back if `angles` has a table. If `sum` is not null, the stored rows of the lane's
// chunk, lane % (D / 8), are added to it.
template <int D, class T>
DEVICE void store_rows(T *out, u32 stride, u32 first, u32 rows, T *tile, u32 row, const float (&c)[D / 8][4],
                       const float (&factor)[2], Angles angles, float *sum = nullptr) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            T *chunk = tile + place_in_tile<D>(row + lane / 4 + 8 * half, n);
            reinterpret_cast<u32 *>(chunk)[lane % 4] =
                pack_pair<T>(c[n][2 * half] * factor[half], c[n][2 * half + 1] * factor[half]);
        }
    __syncwarp();
#pragma unroll
    for (u32 i = lane; i < 16 * (D / 8); i += 32) {
        u32 r = row + i / (D / 8), chunk = i % (D / 8);
        if (first + r >= rows) continue;
        uint4 stored = *reinterpret_cast<const uint4 *>(tile + place_in_tile<D>(r, chunk));
        if (angles.table) {
            uint4 other = *reinterpret_cast<const uint4 *>(tile + place_in_tile<D>(r, chunk ^ D / 16));
            stored = rotate_back<D, T>(stored, other, chunk, first + r, angles);
        }
        *reinterpret_cast<uint4 *>(out + (u64)(first + r) * stride + chunk * 8) = stored;
        if (!sum) continue;
        T elems[8];
        unpack(stored, &elems->bits);
#pragma unroll
        for (int e = 0; e < 8; e++) sum[e] += widen(elems[e]);
    }
}

// Adds up the sums of store_rows over the lanes of each chunk, then over the block's warps in order, and writes D sums
// to `out`. They pass through each warp's rows of the tile of store_rows.
template <int D, int ROW_TILES, int WARPS, class T> DEVICE void store_sums(float *out, T *tile, float (&sum)[8]) {
    constexpr u32 CHUNKS = D / 8;
    u32 lane = threadIdx.x % 32;
    auto of_warp = [&](u32 warp) { return reinterpret_cast<float *>(tile + warp * 16 * ROW_TILES * D); };
#pragma unroll
    for (u32 lanes = CHUNKS; lanes < 32; lanes *= 2)
#pragma unroll
        for (int e = 0; e < 8; e++) sum[e] += __shfl_xor_sync(ALL_LANES, sum[e], lanes);
    __syncwarp();
    if (lane < CHUNKS) {
#pragma unroll
        for (int e = 0; e < 8; e++) of_warp(threadIdx.x / 32)[8 * lane + e] = sum[e];
    }
    __syncthreads();
    for (u32 col = threadIdx.x; col < D; col += 32 * WARPS) {
        float total = of_warp(0)[col];
#pragma unroll
        for (u32 warp = 1; warp < WARPS; warp++) total += of_warp(warp)[col];
        out[col] = total;
    }
}
