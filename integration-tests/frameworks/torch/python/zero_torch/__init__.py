"""ZeRO for any `torch.nn.Module`, by DeepSpeed's calls: `import zero_torch as deepspeed`."""

from . import zero
from .engine import Engine, initialize
from .init import init
from .world import ConfigError

__all__ = ["ConfigError", "Engine", "init", "initialize", "zero"]
