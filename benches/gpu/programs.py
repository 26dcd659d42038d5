"""Reads cargo's JSON messages and prints KIND, NAME and PATH of each program: kind test, bench or bin.

A test's name is CRATE.TARGET, since several crates have a test of one name. The kind `library` is zero-alloc-torch for PyTorch.
"""

import json
import sys

for line in sys.stdin:
    if not line.startswith("{"):
        continue
    message = json.loads(line)
    if message["reason"] != "compiler-artifact":
        continue
    target = message["target"]
    if target["name"] == "zero_alloc_torch" and "cdylib" in target["kind"] and not message["profile"]["test"]:
        for path in message["filenames"]:
            if path.endswith(".so"):
                print("library", "libzero_alloc_torch.so", path, sep="\t")
    if not message.get("executable"):
        continue
    kind = target["kind"][0]
    name = target["name"]
    if message["profile"]["test"] and kind != "bench":
        folder = message["manifest_path"].split("/")[-2]
        suffix = "" if kind == "test" else f"-{kind}"
        kind, name = "test", f"{folder}.{name}{suffix}"
    print(kind, name, message["executable"], sep="\t")
