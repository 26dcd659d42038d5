"""DeepSpeed's configuration, by the rules of `zero train --config`; what this engine does not have is refused by name."""

import json
import os

from . import _native
from .world import ConfigError, log


class Config:
    """Its attributes are those of `Settings` in src/config.rs."""

    def __init__(self, config, world_size):
        place = ""
        if isinstance(config, (str, os.PathLike)):
            place = f"{os.fspath(config)}: "
            with open(config, encoding="utf-8") as file:
                text = file.read()
        elif isinstance(config, dict):
            # accelerate's word for never, which JSON has not.
            config = {name: value for name, value in config.items() if (name, value) != ("steps_per_print", float("inf"))}
            try:
                text = json.dumps(config)
            except TypeError as error:
                raise ConfigError(f"config: {error}") from None
        else:
            raise ConfigError("config: expected a file or a dict; pass initialize(..., config=...)")
        try:
            settings = _native.read_config(text, world_size)
        except ValueError as error:
            raise ConfigError(f"{place}{error}") from None
        vars(self).update(settings)
        try:
            self.given = json.loads(text)
        except ValueError:
            # With comments, which only the rules above have.
            self.given = {}
        for warning in self.warnings:
            log.warning("%s%s", place, warning)

    def take_optimizer(self, optimizer):
        """Takes the settings of an optimizer of torch, which the engine replaces."""
        import torch

        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            raise ConfigError(
                f'optimizer {type(optimizer).__name__}: this engine has Adam and AdamW, and Muon by optimizer.type "Muon" of the configuration'
            )
        defaults = optimizer.defaults
        if defaults.get("amsgrad") or defaults.get("maximize"):
            raise ConfigError("optimizer: this engine has neither amsgrad nor maximize")
        self.lr, self.betas, self.eps = defaults["lr"], tuple(defaults["betas"]), defaults["eps"]
        self.weight_decay, self.bias_correction, self.moments = defaults["weight_decay"], True, "fp32"
        self.muon = None
        self.decoupled = isinstance(optimizer, torch.optim.AdamW) or defaults.get("decoupled_weight_decay", False)

    @property
    def base_lr(self):
        """The engine's learning rate, of which those of groups are factors."""
        return self.lr if self.scheduler else 1.0

    def optimizer_json(self):
        hyper = {
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "decoupled": self.decoupled,
            "bias_correction": self.bias_correction,
        }
        return json.dumps({
            "hyper": hyper,
            "moments": self.moments,
            "muon": json.loads(self.muon) if self.muon else None,
            "lr": self.base_lr,
            "schedule": json.loads(self.scheduler) if self.scheduler else {"type": "Constant"},
            "max_grad_norm": self.clip,
            "loss_scaling": json.loads(self.scaling),
        })
