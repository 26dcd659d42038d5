"""Compares the last loss of two outputs of cuda_train, to the bit: same_loss.py OFFLOADED DEVICE."""

import json
import sys


def last_loss(path):
    with open(path) as file:
        losses = [json.loads(line)["loss"] for line in file if line.startswith("{")]
    if not losses:
        sys.exit(f"{path} has no loss: its run failed")
    return losses[-1]


losses = [last_loss(path) for path in sys.argv[1:3]]
print(f"loss {losses[0]!r} with offload, {losses[1]!r} without")
if losses[0] != losses[1]:
    sys.exit("the bits differ")
