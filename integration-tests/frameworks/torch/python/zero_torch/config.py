"""DeepSpeed's configuration, as far as an engine on the host has it. What it has not is refused by name."""

import json
import os

# Keys that change no number and that this engine has no use for.
WITHOUT_EFFECT = {
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "prescale_gradients", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer", "gradient_predivide_factor", "disable_allgather", "seed",
}
KNOWN = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "optimizer", "scheduler",
    "bf16", "bfloat16", "fp16", "communication_data_type", "zero_optimization",
}
# Sizes and orders of transfers: this engine chooses its own.
ZERO_WITHOUT_EFFECT = {
    "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions", "allgather_bucket_size", "overlap_comm",
    "round_robin_gradients", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters",
}
OFF = (None, False, "none", {"device": "none"})


class ConfigError(ValueError):
    """A key or a value that cannot be used."""


def block(config, name):
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: expected an object, got {value!r}")
    return value


def is_enabled(config, name):
    return bool(block(config, name).get("enabled", False))


def batch_sizes(config, world_size):
    """The rows of a step, of a micro-batch, and the micro-batches: two of them give the third."""
    rows = config.get("train_batch_size")
    micro = config.get("train_micro_batch_size_per_gpu")
    count = config.get("gradient_accumulation_steps")
    for name, value in (("train_batch_size", rows), ("train_micro_batch_size_per_gpu", micro), ("gradient_accumulation_steps", count)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}: expected a number of at least 1, got {value!r}")
    if rows is not None and micro is None:
        micro = rows // ((count or 1) * world_size)
    if rows is not None and count is None:
        count = rows // (micro * world_size) if micro else 0
    count = count or 1
    if micro and rows is None:
        rows = micro * count * world_size
    if rows is not None and rows != micro * count * world_size:
        raise ConfigError(
            f"train_batch_size {rows} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {count} x "
            f"{world_size} ranks"
        )
    return rows, micro, count


class Config:
    def __init__(self, config, world_size):
        if isinstance(config, (str, os.PathLike)):
            with open(config, encoding="utf-8") as file:
                config = json.load(file)
        if not isinstance(config, dict):
            raise ConfigError("config: expected a file or a dict; pass initialize(..., config=...)")
        for name in config:
            if name not in KNOWN | WITHOUT_EFFECT:
                raise ConfigError(f"{name}: this engine does not have it; remove the key")
        if autos := [name for name, value in config.items() if value == "auto"]:
            raise ConfigError(f'{autos[0]}: "auto" is set by a trainer around the engine; give a value')

        zero = block(config, "zero_optimization")
        for name, value in zero.items():
            if name not in ZERO_WITHOUT_EFFECT | {"stage"} and value not in OFF:
                raise ConfigError(f"zero_optimization.{name}: this engine does not have it; remove the key")
        self.stage = zero.get("stage", 0)
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_optimization.stage: expected 0 to 3, got {self.stage!r}")

        self.batch_size, self.micro_batch_size, self.micro_batches = batch_sizes(config, world_size)
        self.clip = config.get("gradient_clipping") or 0.0
        bf16 = is_enabled(config, "bf16") or is_enabled(config, "bfloat16")
        fp16 = is_enabled(config, "fp16")
        if bf16 and fp16:
            raise ConfigError("bf16 and fp16 are both enabled; choose one")
        self.dtype = "bf16" if bf16 else "fp16" if fp16 else "fp32"
        self.reduce_dtype = self._reduce_dtype(config.get("communication_data_type"))
        self.scheduler = config.get("scheduler")
        self._read_optimizer(block(config, "optimizer"))
        self.scaling = self._loss_scaling(block(config, "fp16")) if fp16 else {"static": {"scale": 1.0}}

    @staticmethod
    def _reduce_dtype(name):
        names = {None: None, "fp32": "fp32", "bf16": "bf16", "bfp16": "bf16", "fp16": "fp16"}
        if name not in names:
            raise ConfigError(f"communication_data_type: expected fp32, bf16 or fp16, got {name!r}")
        return names[name]

    def _read_optimizer(self, optimizer):
        kind = optimizer.get("type", "AdamW")
        if kind not in ("Adam", "AdamW"):
            raise ConfigError(f"optimizer.type {kind}: this engine has Adam and AdamW")
        params = dict(optimizer.get("params") or {})
        self.lr = params.pop("lr", 1e-3)
        self.betas = tuple(params.pop("betas", (0.9, 0.999)))
        self.eps = params.pop("eps", 1e-8)
        decoupled = params.pop("adam_w_mode", True) or kind == "AdamW"
        self.decoupled = decoupled
        self.weight_decay = params.pop("weight_decay", 0.01 if kind == "AdamW" else 0.0)
        self.bias_correction = params.pop("bias_correction", True)
        for name in ("torch_adam", "fused", "foreach", "freeze_step"):
            params.pop(name, None)
        if params:
            raise ConfigError(f"optimizer.params.{next(iter(params))}: this engine does not have it; remove the key")

    @staticmethod
    def _loss_scaling(fp16):
        if scale := fp16.get("loss_scale", 0):
            return {"static": {"scale": float(scale)}}
        return {
            "dynamic": {
                "initial_scale_power": fp16.get("initial_scale_power", 16),
                "window": fp16.get("loss_scale_window", 1000),
                "hysteresis": fp16.get("hysteresis", 2),
                "consecutive_hysteresis": fp16.get("consecutive_hysteresis", False),
                "min_scale": float(fp16.get("min_loss_scale", 1)),
                "fail_at_min": True,
            }
        }

    def take_optimizer(self, optimizer):
        """Takes the settings of an optimizer of torch, which the engine replaces."""
        import torch

        if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            raise ConfigError(f"optimizer {type(optimizer).__name__}: this engine has Adam and AdamW")
        defaults = optimizer.defaults
        if defaults.get("amsgrad") or defaults.get("maximize"):
            raise ConfigError("optimizer: this engine has neither amsgrad nor maximize")
        self.lr, self.betas, self.eps = defaults["lr"], tuple(defaults["betas"]), defaults["eps"]
        self.weight_decay = defaults["weight_decay"]
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
            "lr": self.base_lr,
            "schedule": self.scheduler or {"type": "Constant"},
            "max_grad_norm": self.clip,
            "loss_scaling": self.scaling,
        })
