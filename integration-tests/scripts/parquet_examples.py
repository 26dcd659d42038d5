#!/usr/bin/env python3
"""Writes the parquet files of the tests of `zero`: the rows of messages.jsonl, by two writers.

    pip install pyarrow polars
    integration-tests/scripts/parquet_examples.py
"""
import json
import os

import polars
import pyarrow
import pyarrow.parquet

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "zero", "tests", "data", "parquet")
ROWS = [
    {"messages": [{"role": "user", "content": f"What is {i} + {i}?"},
                  {"role": "assistant", "content": f"{2 * i}, mon ami \U0001f600"}]}
    for i in range(40)
] + [{"messages": [{"role": "user", "content": "a\n\tb"}]}]


def main():
    os.makedirs(FOLDER, exist_ok=True)
    with open(os.path.join(FOLDER, "messages.jsonl"), "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)

    # A column that is no key is not read.
    table = pyarrow.Table.from_pylist([dict(row, id=i) for i, row in enumerate(ROWS)])
    for codec in ("snappy", "gzip", "none"):
        # Several row groups, with several pages each.
        pyarrow.parquet.write_table(table, os.path.join(FOLDER, f"{codec}.parquet"), compression=codec,
                                    row_group_size=17, data_page_size=64)
    polars.DataFrame(ROWS).write_parquet(os.path.join(FOLDER, "zstd.parquet"), compression="zstd")
    other = pyarrow.table({"id": [1, 2], "content": ["a", "b"]})
    pyarrow.parquet.write_table(other, os.path.join(FOLDER, "other.parquet"))


if __name__ == "__main__":
    main()
