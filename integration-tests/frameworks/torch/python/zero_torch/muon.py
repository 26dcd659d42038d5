"""The parameters that Muon updates: matrices of hidden layers, by DeepSpeed's `param.use_muon`."""

import json

from torch import nn

from .world import ConfigError, log


def inputs_first(model):
    """The identities of weights that are `[inputs, outputs]`: those of transformers' Conv1D."""
    return {id(module.weight) for module in model.modules() if type(module).__name__ == "Conv1D" and hasattr(module, "nf")}


def embeddings(model):
    """The identities of the parameters of embeddings, and of the head if the model names it."""
    found = {
        id(param) for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for param in module.parameters(False)
    }
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return found | {id(param) for param in head.parameters(False)} if isinstance(head, nn.Module) else found


class Choice:
    """Whether a parameter of `model` has Muon."""

    def __init__(self, model):
        self._embeddings = embeddings(model)

    def has_muon(self, name, param, group):
        """As its group or its `use_muon` has it, or else by its shape and its name."""
        wished = group.get("use_muon", getattr(param, "use_muon", None))
        if wished is None:
            is_named = any(word in name.lower() for word in ("embed", "lm_head"))
            return param.dim() == 2 and id(param) not in self._embeddings and not is_named
        if wished and id(param) in self._embeddings:
            raise ConfigError(f"Muon is for matrices of hidden layers, and {name} is an embedding or the head: set its use_muon to False")
        if wished and param.dim() != 2:
            raise ConfigError(f"Muon is for matrices, and {name} has the shape {tuple(param.shape)}: set its use_muon to False")
        return bool(wished)


def halves(groups, model, names, config):
    """`groups` with each as two, of Muon and of Adam, as DeepSpeed's engine has them."""
    choice, name_of, found = Choice(model), {id(param): name for name, param in names.items()}, []
    momentum = json.loads(config.muon)["momentum"]
    muon_lr = config.lr if config.muon_lr is None else config.muon_lr
    for index, group in enumerate(groups):
        if group.get("momentum", momentum) != momentum:
            raise ConfigError(f"a group has momentum {group['momentum']}: all groups of Muon have that of the optimizer, {momentum}")
        trained = [param for param in group["params"] if param.requires_grad]
        of_muon = {id(param) for param in trained if choice.has_muon(name_of.get(id(param), ""), param, group)}
        prefix = group.get("name") or (f"group{index}" if len(groups) > 1 else None)
        for use_muon, label, lr in ((True, "muon", muon_lr), (False, "adam", config.lr)):
            params = [param for param in trained if (id(param) in of_muon) is use_muon]
            if params:
                name = f"{prefix}-{label}-params" if prefix else f"{label}-params"
                found.append({"lr": lr, **group, "params": params, "use_muon": use_muon, "name": name})
    by_muon = [name_of.get(id(param)) for group in found if group["use_muon"] for param in group["params"]]
    if not by_muon:
        raise ConfigError(
            'optimizer.type "Muon" would update nothing: no parameter of two dimensions is trained but embeddings and the head; use AdamW'
        )
    log.info("Muon updates %d of %d parameters: %s", len(by_muon), len(names), ", ".join(map(str, by_muon)))
    return found
