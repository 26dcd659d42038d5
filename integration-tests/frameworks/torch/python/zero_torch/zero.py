"""DeepSpeed's `deepspeed.zero`."""

from contextlib import ExitStack, contextmanager

import torch

from .world import ConfigError
from .init import init
from .sharded import sharded_of


def Init(module=None, **_options):  # noqa: N802
    """`zero_torch.init()`; a module that exists is sharded by `initialize`."""
    return init()


@contextmanager
def GatheredParameters(params, modifier_rank=None, fwd_module=None, enabled=True):  # noqa: N802
    """The parameters are whole in this context, for reading. All ranks enter it; `params` is one, several, or a module."""
    if isinstance(params, torch.nn.Module):
        params = params.parameters()
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    of_module = {}
    for param in params if enabled else []:
        if sharded := sharded_of(param):
            of_module.setdefault(sharded, []).append(param)
    if of_module and modifier_rank is not None:
        raise ConfigError("GatheredParameters: this engine has no modifier_rank; change parameters before initialize, or load a checkpoint")
    with ExitStack() as stack:
        for sharded, own in of_module.items():
            stack.enter_context(sharded.whole(own))
        yield


def register_external_parameter(module, parameter):
    """Nothing: parameters that several blocks have are whole for the whole pass."""


unregister_external_parameter = register_external_parameter
