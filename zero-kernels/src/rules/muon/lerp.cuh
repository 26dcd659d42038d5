// One element of Muon's first phase, with an fp32 momentum or with one in blocks.

// `StepScalars` as Muon reads it.
struct MuonScalars {
    float grad_scale;
    float lr;
    float one_minus_momentum;
    float momentum;
    float unused[3];
    u32 skip;
};

static_assert(sizeof(MuonScalars) == sizeof(StepScalars), "as on the host");

struct MuonConstants {
    u32 nesterov;
};

// `Lerp` of host.rs.
__device__ __forceinline__ float lerp(float start, float end, float weight) {
    bool from_start = weight < 0.5f;
    float coefficient = from_start ? weight : __fsub_rn(weight, 1.0f);
    return __fmaf_rn(coefficient, __fsub_rn(end, start), from_start ? start : end);
}

__device__ __forceinline__ void muon_element(MuonScalars s, MuonConstants c, float &direction, float &m, float g) {
    g = __fmul_rn(g, s.grad_scale);
    m = lerp(m, g, s.one_minus_momentum);
    direction = c.nesterov ? lerp(g, m, s.momentum) : m;
}
