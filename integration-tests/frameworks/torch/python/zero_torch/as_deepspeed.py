"""zero_torch under DeepSpeed's name, for programs that import it by themselves: accelerate, and the Trainer of transformers."""

import importlib.machinery
import importlib.metadata
import logging
import sys
import types

# The release whose calls these are.
VERSION = "0.19.8"


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename):
        return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        raise FileNotFoundError(path)


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, name, path=None, target=None):
        return None

    def find_distributions(self, context):
        return [_Distribution()] if context.name == "deepspeed" else []


def _module(name, **values):
    module = types.ModuleType(name)
    module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None, is_package=True), []
    vars(module).update(values)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def install_as_deepspeed():
    """Makes `import deepspeed` find this package; call it before transformers and accelerate are imported."""
    import zero_torch

    if "deepspeed" in sys.modules:
        raise RuntimeError("install_as_deepspeed: deepspeed is imported; call this once, before the imports of transformers and accelerate")
    # Before those of folders, where DeepSpeed may be installed, too.
    sys.meta_path.insert(0, _Finder())
    names = ("add_config_arguments", "comm", "init_distributed", "initialize", "zero")
    _module("deepspeed", __version__=VERSION, DeepSpeedEngine=zero_torch.Engine, **{name: getattr(zero_torch, name) for name in names})
    sys.modules["deepspeed.comm"], sys.modules["deepspeed.zero"] = zero_torch.comm, zero_torch.zero
    _module("deepspeed.utils", logger=logging.getLogger("zero_torch"))
    _module("deepspeed.runtime")
    _module("deepspeed.runtime.lr_schedules", VALID_LR_SCHEDULES=[])
    _module("deepspeed.checkpoint")
    _module("deepspeed.checkpoint.utils", clone_tensors_for_torch_save=lambda state: {name: value.clone() for name, value in state.items()})
