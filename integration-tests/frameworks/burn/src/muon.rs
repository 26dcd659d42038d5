//! Muon for the matrices of hidden layers.

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use zero_alloc::host::HostDevice;
use zero_kernels::Muon;
use zero_optim::framework::Builder;
use zero_optim::{GroupRules, Matrix};

use crate::tensors::{Result, setting};

/// Sets [`Muon`] for the matrices of hidden layers, with `lr_scale` times the learning rate of
/// `builder`; all other parameters keep its AdamW. A parameter has Muon if it has two dimensions
/// and `is_hidden` accepts its path, such as `layers.3.pwff.linear_inner.weight`. The last layer
/// should keep AdamW.
///
/// A matrix is `[inputs, outputs]`, as in burn's layers. This replaces the groups and the matrices
/// of `builder`; [`Builder::matrices`] behind it may split what is fused.
///
/// # Errors
/// `is_hidden` accepts an embedding, or no matrix.
pub fn with_muon<M: Module>(
    builder: Builder<HostDevice>,
    model: &M,
    (muon, lr_scale): (Muon, f64),
    is_hidden: impl Fn(&str) -> bool,
) -> Result<Builder<HostDevice>> {
    let mut hidden = Hidden {
        is_hidden,
        path: Vec::new(),
        containers: Vec::new(),
        matrices: HashSet::new(),
        embedding: None,
    };
    model.visit(&mut hidden);
    if let Some(path) = hidden.embedding {
        return Err(setting(format!(
            "Muon is for matrices of hidden layers, and {path} is an embedding: let is_hidden reject it, \
             so that AdamW updates it"
        )));
    }
    if hidden.matrices.is_empty() {
        return Err(setting(
            "Muon would update nothing: is_hidden accepts no parameter of two dimensions; it is called \
             with paths such as layers.3.pwff.linear_inner.weight"
                .into(),
        ));
    }

    let others = GroupRules::default();
    let of_muon = others.lr_scale(lr_scale);
    let matrices = hidden.matrices;
    Ok(builder
        .groups([others, of_muon], move |path| {
            usize::from(matrices.contains(path))
        })
        .group_rule(1, Arc::new(muon))
        .matrices(|_, shape| match *shape {
            [inputs, outputs] => vec![Matrix::conv1d(inputs as usize, outputs as usize)],
            _ => Vec::new(),
        }))
}

/// The matrices that a function of their paths accepts.
struct Hidden<F> {
    is_hidden: F,
    path: Vec<String>,
    /// The types of the modules on the path, such as `Struct:Linear`.
    containers: Vec<String>,
    matrices: HashSet<String>,
    /// An accepted embedding.
    embedding: Option<String>,
}

impl<F: Fn(&str) -> bool> ModuleVisitor for Hidden<F> {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.path.push(name.to_owned());
        self.containers.push(container_type.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
        self.containers.pop();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        if D != 2 || !(self.is_hidden)(&path) {
            return;
        }
        let container = self.containers.last();
        if container.is_some_and(|container| container.ends_with("Embedding")) {
            self.embedding.get_or_insert(path);
        } else {
            self.matrices.insert(path);
        }
    }
}
