"""Bytes between ranks on several machines, over torch.distributed: gloo, in a group of its own, which an abort can close."""

import os
import secrets
import socket
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from .units import view


class Transport:
    def __init__(self, limit):
        # A wait of the group must not end before the engine's, which names the rank at fault.
        limit = timedelta(seconds=2 * limit)
        self._is_own = not dist.is_initialized()
        if self._is_own:
            dist.init_process_group("gloo", timeout=limit)
        self._group = dist.new_group(backend="gloo", timeout=limit)
        self._aborting = threading.Lock()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

        # Where the engine's ranks meet, and the secret that admits them.
        place = [None]
        if self.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                place = [(os.environ.get("MASTER_ADDR") or socket.gethostname(), probe.getsockname()[1], secrets.token_hex(16))]
        dist.broadcast_object_list(place, 0, group=self._group)
        self.host, self.port, self.token = place[0]

    def exchange(self, parts):
        """Sends and receives bytes: of each other rank, its number, what it gets and what it sends, as addresses and lengths."""
        works = []
        try:
            for rank, _, received in parts:
                if received[1]:
                    works.append(dist.irecv(view(*received, torch.uint8), rank, self._group))
            for rank, sent, _ in parts:
                if sent[1]:
                    works.append(dist.isend(view(*sent, torch.uint8), rank, self._group))
            for work in works:
                work.wait()
        except BaseException:
            # Nothing may write to the memory any more.
            self.abort()
            raise

    def abort(self):
        """Closes the group's connections, which ends its transfers with an error, here and on the other ranks."""
        # One at a time: behind it all are closed.
        with self._aborting:
            for rank in range(self.world_size):
                try:
                    # gloo closes all connections at a wait that is late. Nothing is sent with this tag.
                    if rank != self.rank:
                        dist.irecv(torch.empty(1, dtype=torch.uint8), rank, self._group, tag=1).wait(timedelta(milliseconds=1))
                except (RuntimeError, ValueError):
                    # Late, or closed before; the next one may be open.
                    pass

    def close(self):
        if self._is_own and dist.is_initialized():
            dist.destroy_process_group()
