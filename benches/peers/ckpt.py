"""Times the peers of zero-ckpt on the same bytes: safetensors save_file with fsync, and torch DCP with fsync.

python3 ckpt.py DIR GIB ROUNDS: prints one JSON object per round, {"safetensors_s": .., "dcp_s": ..}.
Started by `ckpt_speed`; the time of a peer that is not installed is null.
"""

import json
import os
import shutil
import sys
import time


def main():
    folder, gib, rounds = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    import torch

    elems = int(gib * 2**30) // 4 // 3
    # 3 states of 12 tensors each, as on a rank of the trainer.
    state = {f"{s}.{i}": torch.randn(elems // 12) for s in ("master", "m", "v") for i in range(12)}
    for _ in range(rounds):
        sys.stdin.readline()
        out = {"bytes": sum(t.numel() * 4 for t in state.values()), "safetensors_s": None, "dcp_s": None}
        try:
            from safetensors.torch import save_file

            path = os.path.join(folder, "peer.safetensors")
            start = time.perf_counter()
            save_file(state, path)
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
            out["safetensors_s"] = time.perf_counter() - start
            os.remove(path)
        except ImportError:
            pass
        try:
            import torch.distributed.checkpoint as dcp

            path = os.path.join(folder, "peer.dcp")
            start = time.perf_counter()
            # DCP's file writer syncs its files by default (sync_files=True).
            dcp.save(state, checkpoint_id=path)
            out["dcp_s"] = time.perf_counter() - start
            shutil.rmtree(path)
        except ImportError:
            pass
        print(json.dumps(out), flush=True)


main()
