"""DeepSpeed's `deepspeed.comm`, as far as the ranks of a job go: collectives of tensors are torch.distributed's."""

import os

import torch.distributed as dist

from .world import device_of_rank, world


def init_distributed(dist_backend=None, *_args, **_options):
    """Joins the ranks of the job, and begins torch.distributed under a launcher that names its ranks, for the program's own use."""
    world()
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys() and not dist.is_initialized():
        dist.init_process_group("gloo" if device_of_rank().type == "cpu" else dist_backend or "cpu:gloo,cuda:nccl")


def is_initialized():
    return True


def get_rank(group=None):
    return world().rank


def get_world_size(group=None):
    return world().world_size


def get_local_rank():
    return int(os.environ.get("LOCAL_RANK", 0))
