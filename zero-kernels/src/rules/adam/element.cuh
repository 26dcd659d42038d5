// One element of Adam, with fp32 moments or with moments in blocks.

// `StepScalars` as Adam reads it (`AdamScalars` of the host).
struct AdamScalars {
    float grad_scale;
    float lr;
    float step_size;
    float bias_correction2_sqrt;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    u32 skip;
};

static_assert(sizeof(AdamScalars) == sizeof(StepScalars), "as on the host");

// Constants of Adam, rounded to fp32 on the host.
struct AdamConstants {
    float eps;
    float weight_decay;
    u32 decoupled;
};

// One element of Adam: the same operations in the same order as `element` of host.rs.
__device__ __forceinline__ void adam_element(AdamScalars s, AdamConstants c, float keep, float &w, float &m, float &v,
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

// AdamW's factor of the weights: 1 - lr * weight_decay.
__device__ __forceinline__ float adam_keep(AdamScalars s, AdamConstants c) {
    return __fsub_rn(1.0f, __fmul_rn(s.lr, c.weight_decay));
}
