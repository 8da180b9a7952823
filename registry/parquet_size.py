"""Memory that the rows of a Parquet file need, by its footer: some kB can stand for billions."""

from __future__ import annotations

from typing import Any

import psutil

CELL = 180
"""Bytes of memory of a cell of a table. Measured: 540 for a row of three short texts."""
COPIES = 5
"""Of the bytes of a text, while it is read. Measured: 4.0 GB for one of 0.8 GB."""


def too_large(metadata: Any) -> str:
    """Why this machine cannot hold a file's rows; empty: it can. `metadata`: pyarrow's."""
    unpacked = sum(metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups))
    needed = CELL * metadata.num_rows * metadata.num_columns + COPIES * unpacked
    free = psutil.virtual_memory().available
    if needed <= free:
        return ""
    return (
        f"{metadata.num_rows} rows, {unpacked / 1e9:.1f} GB unpacked, need about "
        f"{needed / 2**30:.0f} GiB of memory; {free / 2**30:.0f} GiB are free"
    )
