"""Starts ranks as processes, each with a limit, and returns what they printed."""

import os
import signal
import socket
import subprocess
import sys
import time

# Seconds for all ranks of a job, with their imports.
LIMIT = 60


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Job:
    """Ranks that run `program --rank` with `args`."""

    def __init__(self, program, ranks, *args, **variables):
        self.begun = time.monotonic()
        port, variables = str(free_port()), {name: str(value) for name, value in variables.items()}
        self.processes = [
            subprocess.Popen(
                [sys.executable, program, "--rank", *map(str, args)], text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                env={
                    **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables,
                },
            )
            for rank in range(ranks)
        ]

    def wait_for(self, text, rank):
        """Reads the output of `rank` up to a line with `text`."""
        for line in self.processes[rank].stdout:
            if text in line:
                return
        raise AssertionError(f"rank {rank} ended without {text!r}")

    def end(self):
        """Waits; returns the codes, what the ranks printed, and the seconds since the start. A rank that is late is a failure."""
        outputs, late = [], []
        for rank, process in enumerate(self.processes):
            try:
                left = max(0.1, LIMIT - (time.monotonic() - self.begun))
                outputs.append(process.communicate(timeout=left)[0])
            except subprocess.TimeoutExpired:
                late.append(rank)
                # Where it is.
                process.send_signal(signal.SIGABRT)
                time.sleep(1)
                self.kill(process)
                outputs.append(process.communicate()[0])
        seconds = time.monotonic() - self.begun
        for process in self.processes:
            # What it has started, and left.
            self.kill(process)
        text = "".join(f"\n--- rank {rank}: {process.returncode}\n{output}" for rank, (process, output) in enumerate(zip(self.processes, outputs)))
        assert not late, f"ranks {late} did not end within {LIMIT} seconds:{text}"
        return [process.returncode for process in self.processes], outputs, seconds

    @staticmethod
    def kill(process):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def run(rank_main, main):
    """The entry of a test that starts ranks of itself: `--rank CASE STAGE` is one of them."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], int(sys.argv[3]))
    else:
        main()
