//! The parameters of a block, by their use.

/// Something for each parameter of a block, such as its elements; empty for those that the family does
/// not have. A norm has a gain and a bias, a linear layer a matrix and a bias.
#[derive(Clone)]
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
    /// Calls `of` with each, in the order of the unit.
    pub(crate) fn map<Q>(self, mut of: impl FnMut(P) -> Q) -> BlockParams<Q> {
        BlockParams {
            norm1: self.norm1.map(&mut of),
            qkv: self.qkv.map(&mut of),
            qk_norm: of(self.qk_norm),
            output: self.output.map(&mut of),
            norm2: self.norm2.map(&mut of),
            up: self.up.map(&mut of),
            down: self.down.map(&mut of),
        }
    }

    /// Those of the norms, of which ranks of tensor parallelism may have parts of the sums.
    pub(crate) fn norms(&mut self) -> [&mut P; 5] {
        let [gain1, bias1] = &mut self.norm1;
        let [gain2, bias2] = &mut self.norm2;
        [&mut self.qk_norm, gain1, bias1, gain2, bias2]
    }
}
