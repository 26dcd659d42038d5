#!/usr/bin/env python3
"""Writes a small libnccl.so.2: NCCL's published library with the code of one GPU architecture only.

    nccl_slim.py OUT [ARCHITECTURE]      90 by default (H100, H200)

The code of other architectures becomes zeros, so nothing moves in the file and it compresses to a sixth. NCCL 2.30 or
later: several ranks may share a GPU.
"""

import os
import struct
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "nvidia-nccl-cu13==2.30.7"
MEMBER = "nvidia/nccl/lib/libnccl.so.2"
# A fat binary: magic, version, length of the header, length of what follows it. Then entries.
FAT_HEADER = struct.Struct("<IHHQ")
FAT_MAGIC = 0xBA55ED50
# An entry: kind, version, length of the header, length of the code. The architecture is at byte 28.
ENTRY_HEADER = struct.Struct("<HHIQ")
ARCHITECTURE_AT = 28
MACHINE_CODE = 2


def download():
    """The library of the package."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", folder, PACKAGE], check=True)
        (wheel,) = os.listdir(folder)
        with zipfile.ZipFile(os.path.join(folder, wheel)) as files:
            return bytearray(files.read(MEMBER))


def blank(library, begin, end, architecture):
    """Blanks the entries in a range but those of machine code for the architecture; returns the bytes kept."""
    kept = 0
    while begin < end:
        kind, _, header, length = ENTRY_HEADER.unpack_from(library, begin)
        (target,) = struct.unpack_from("<I", library, begin + ARCHITECTURE_AT)
        code = begin + header
        if kind == MACHINE_CODE and target == architecture:
            kept += length
        else:
            library[code : code + length] = bytes(length)
        begin = code + length
    return kept


def slim(library, architecture):
    """Blanks the code of other architectures; returns the bytes kept."""
    kept = 0
    magic = struct.pack("<I", FAT_MAGIC)
    at = library.find(magic)
    while at >= 0:
        _, version, header, length = FAT_HEADER.unpack_from(library, at)
        end = at + header + length
        if version == 1 and header == FAT_HEADER.size and end <= len(library):
            kept += blank(library, at + header, end, architecture)
            at = library.find(magic, end)
        else:
            # The same bytes by chance.
            at = library.find(magic, at + 4)
    return kept


def main():
    out = sys.argv[1]
    architecture = int(sys.argv[2]) if len(sys.argv) > 2 else 90
    library = download()
    if slim(library, architecture) == 0:
        sys.exit(f"{PACKAGE} has no code for architecture {architecture}")
    partial = f"{out}.{os.getpid()}"
    with open(partial, "wb") as file:
        file.write(library)
    os.replace(partial, out)


main()
