# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Which sequences of a cache a call is about."""

from __future__ import annotations

import struct
from typing import Any, Sequence


def lists_of(
    rows: Any, dims: int, sequences: Sequence[int] | None, counts: Sequence[int] | None
) -> tuple[bytes, bytes]:
    """The bytes of a call's sequences (int32) and counts (int64): of rows [B, n, ..], which have `dims`
    dimensions, or of rows [T, ..] with counts."""
    if counts is None:
        if len(rows.shape) != dims:
            raise ValueError(
                f"rows have {len(rows.shape)} dimensions: {dims}, or {dims - 1} with counts, are accepted"
            )
        counts = [rows.shape[1]] * rows.shape[0]
    named = list(range(len(counts))) if sequences is None else [int(i) for i in sequences]
    if len(named) != len(counts):
        raise ValueError(f"{len(named)} sequences and {len(counts)} counts: as many are accepted")
    chosen = struct.pack(f"{len(named)}i", *named)
    return chosen, struct.pack(f"{len(counts)}q", *[int(n) for n in counts])
