//! What is between the two linear layers of an MLP.

use super::activation::Activation;
use super::swiglu;

/// The kinds of MLPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// An elementwise function.
    Plain(Activation),
    /// `silu(gate) up`: the first layer computes both.
    SwiGlu,
}

impl Mlp {
    /// What the first layer computes for each of `inner` activations of a row.
    pub fn up_width(self, inner: usize) -> usize {
        match self {
            Self::Plain(_) => inner,
            Self::SwiGlu => 2 * inner,
        }
    }

    /// The activations `act` `[rows, inner]` of what the first layer computed.
    pub fn forward(self, act: &mut [f32], up: &[f32], inner: usize) {
        match self {
            Self::Plain(activation) => activation.forward(act, up),
            Self::SwiGlu => swiglu::forward(act, up, inner),
        }
    }

    /// Returns the gradient of what the first layer computed, `up`, from that of the activations in
    /// `dact`: it replaces the one or the other.
    pub fn backward<'a>(self, dact: &'a mut [f32], up: &'a mut [f32], inner: usize) -> &'a [f32] {
        match self {
            Self::Plain(activation) => {
                activation.backward(dact, up);
                dact
            }
            Self::SwiGlu => {
                swiglu::backward(up, dact, inner);
                up
            }
        }
    }
}
