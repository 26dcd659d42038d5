// Columns of rows that a warp computes: a lane owns W neighbouring columns of each chunk of 32 W, and adds to sums of
// columns in shared memory.

// The first column of this lane in chunk `i`.
template <int W> __device__ __forceinline__ u32 column(int i) { return (i * 32 + threadIdx.x % 32) * W; }

// Adds to this lane's columns of a chunk of sums. A chunk of 256 columns is stored as the first four of every lane,
// then the last four, so that neighbouring lanes access neighbouring 16 bytes.
template <int W> __device__ __forceinline__ void add_to_chunk(float *chunk, const float (&x)[W]) {
    u32 lane = threadIdx.x % 32;
    if constexpr (W == 8) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float4 *place = reinterpret_cast<float4 *>(chunk + 128 * half) + lane, sum = *place;
            sum.x += x[4 * half], sum.y += x[4 * half + 1], sum.z += x[4 * half + 2], sum.w += x[4 * half + 3];
            *place = sum;
        }
    } else {
        chunk[lane] += x[0];
    }
}
// The place of a column in the chunks of add_to_chunk.
template <int W> __device__ __forceinline__ u32 place_in_chunks(u32 col) {
    return W == 8 ? col / 256 * 256 + col % 8 / 4 * 128 + col % 256 / 8 * 4 + col % 4 : col;
}
