//! The parameters of a block, by their use.

/// Parameters of a block.
pub(crate) const BLOCK_PARAMS: usize = 13;

/// Something for each parameter of a block, such as its elements; empty for those that the family does
/// not have. A norm has a gain and a bias, a linear layer a matrix and a bias.
pub(crate) struct BlockParams<P> {
    pub(crate) norm1: [P; 2],
    pub(crate) qkv: [P; 2],
    /// The gains of the norms of queries and of keys.
    pub(crate) qk_norm: P,
    pub(crate) output: [P; 2],
    pub(crate) norm2: [P; 2],
    pub(crate) up: [P; 2],
    pub(crate) down: [P; 2],
}

impl<P> BlockParams<P> {
    /// Those in the order of the unit.
    pub(crate) fn new(in_order: [P; BLOCK_PARAMS]) -> Self {
        let [
            gain1,
            bias1,
            qkv,
            qkv_bias,
            qk_norm,
            output,
            output_bias,
            gain2,
            bias2,
            up,
            up_bias,
            down,
            down_bias,
        ] = in_order;
        Self {
            norm1: [gain1, bias1],
            qkv: [qkv, qkv_bias],
            qk_norm,
            output: [output, output_bias],
            norm2: [gain2, bias2],
            up: [up, up_bias],
            down: [down, down_bias],
        }
    }

    /// Those of the norms, of which ranks of tensor parallelism may have parts of the sums.
    pub(crate) fn norms(&mut self) -> [&mut P; 5] {
        let [gain1, bias1] = &mut self.norm1;
        let [gain2, bias2] = &mut self.norm2;
        [&mut self.qk_norm, gain1, bias1, gain2, bias2]
    }
}
