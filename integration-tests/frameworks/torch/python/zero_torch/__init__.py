"""ZeRO for any `torch.nn.Module`, by DeepSpeed's calls: `import zero_torch as deepspeed`."""

from . import comm, zero
from ._native import __version__
from .as_deepspeed import install_as_deepspeed
from .comm import init_distributed
from .engine import Engine, initialize
from .fully_shard import fully_shard
from .init import init
from .world import ConfigError

__all__ = [
    "ConfigError", "Engine", "__version__", "add_config_arguments", "comm", "fully_shard", "init", "init_distributed", "initialize",
    "install_as_deepspeed", "zero",
]


def add_config_arguments(parser):
    """Adds DeepSpeed's arguments to an ArgumentParser; `initialize(args=...)` reads them."""
    group = parser.add_argument_group("zero_torch")
    group.add_argument("--deepspeed", action="store_true", help="use the engine")
    group.add_argument("--deepspeed_config", help="JSON file of the configuration")
    return parser
