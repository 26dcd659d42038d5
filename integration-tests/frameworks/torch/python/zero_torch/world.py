"""The ranks of the job."""

from . import _native

# Of a wait for another rank, in seconds.
LIMIT = 600.0

_world = None


def world():
    """The ranks of the job, which this process joins once."""
    global _world
    if _world is None:
        _world = _native.World(LIMIT)
    return _world
