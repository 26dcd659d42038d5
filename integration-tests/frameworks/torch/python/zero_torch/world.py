"""The ranks of the job."""

import atexit
import functools
import logging
import os
import sys
import traceback

import torch

from . import _native


class ConfigError(ValueError):
    """A key or a value that cannot be used."""


# Of a wait for another rank, in seconds.
LIMIT = 600.0

# Lines of rank 0 alone.
log = logging.getLogger("zero_torch")
log.addFilter(lambda record: _rank == 0)

_world, _rank = None, 0
# The descriptors and inodes of the ranks' connections.
_sockets = []


def world():
    """The ranks of the job, which this process joins once."""
    global _world, _rank
    if _world is None:
        device = device_of_rank()
        transport = _transport() if device.type == "cpu" else None
        _world = _native.World(LIMIT, transport, device.index)
        if transport is not None:
            atexit.register(transport.close)
        _rank = _world.rank
        _sockets.extend(_native.World.sockets())
        # Behind the ends of engines, which come later.
        atexit.register(_world.leave)
    return _world


@functools.cache
def device_of_rank():
    """This rank's GPU, or the CPU on a machine without, or with ZERO_TORCH_DEVICE=cpu."""
    kind = os.environ.get("ZERO_TORCH_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if kind != "cuda":
        raise ConfigError(f"ZERO_TORCH_DEVICE: expected cpu or cuda, got {kind!r}")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


@functools.cache
def stream():
    """The stream of all work on a GPU, torch's current one from now on: the engine refuses the default stream, which waits for others."""
    device = device_of_rank()
    torch.cuda.set_device(device)
    made = torch.cuda.Stream(device)
    made.wait_stream(torch.cuda.current_stream(device))
    torch.cuda.set_stream(made)
    return made


def _transport():
    """torch.distributed between machines; nothing on one, whose ranks share memory."""
    kind = os.environ.get("ZERO_TORCH_TRANSPORT") or ("torch" if _native.has_several_machines() else "processes")
    if kind not in ("torch", "processes"):
        raise ConfigError(f"ZERO_TORCH_TRANSPORT: expected torch or processes, got {kind!r}")
    if kind == "processes":
        return None
    from .transport import Transport

    return Transport(LIMIT)


def _close_in_fork():
    """Closes the connections in a worker: while it has them, the others would not notice that its parent has been killed."""
    for fd, inode in _sockets:
        try:
            if os.fstat(fd).st_ino == inode:
                os.close(fd)
        except OSError:
            # Closed since.
            pass
    _sockets.clear()


os.register_at_fork(after_in_child=_close_in_fork)


def end(native):
    """Ends an engine. If a step is open, all ranks end with the reason."""
    # The error that is handled, or that has ended the program.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    native.close(traceback.format_exception_only(error)[-1].strip() if error else "it exits, or drops its engine, within a step")
