"""DeepSpeed's `deepspeed.comm`, as far as the ranks of a job go: collectives of tensors are torch.distributed's."""

import os

from .world import world


def init_distributed(*_args, **_options):
    """Joins the ranks of the job, by the launcher's variables."""
    world()


def is_initialized():
    return True


def get_rank(group=None):
    return world().rank


def get_world_size(group=None):
    return world().world_size


def get_local_rank():
    return int(os.environ.get("LOCAL_RANK", 0))
