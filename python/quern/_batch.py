# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Which sequences of a cache a call is about, and what a failed one leaves."""

from __future__ import annotations

import contextlib
import operator
import struct
from typing import Any, Iterable, Iterator, Mapping, Sequence


@contextlib.contextmanager
def closed_again(cache: Any) -> Iterator[None]:
    """A cache's first call says what its rows are; one that fails says nothing."""
    handle = cache._handle
    try:
        yield
    except BaseException:
        cache._handle = handle
        raise


def integer(name: str, number: Any, remedy: str = "") -> int:
    """A number that counts; TypeError where it is none."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is {number!r}: an integer is accepted{remedy}") from None


OF_ONE = "; sequence= names the sequence that it is about"


def numbers_of(name: str, numbers: Iterable[Any], kind: str) -> bytes:
    """Integers as bytes: kind "i" int32, "q" int64."""
    try:
        found = [operator.index(n) for n in numbers]
    except TypeError:
        raise TypeError(f"{name} is {numbers!r}: a sequence of integers is accepted") from None
    try:
        return struct.pack(f"{len(found)}{kind}", *found)
    except struct.error:
        bits = 8 * struct.calcsize(kind)
        raise ValueError(f"{name} is {found}: integers of {bits} bits are accepted") from None


def packed(layout: struct.Struct, numbers: Sequence[Any]) -> bytes:
    """Plain numbers as the library's functions take them."""
    try:
        return layout.pack(*numbers)
    except (struct.error, OverflowError):
        kind = "integers of 64 bits" if "q" in layout.format else "numbers of f32"
        raise TypeError(f"{numbers} are given: {kind} are accepted") from None


def named(fields: Mapping[str, int]) -> str:
    """A struct's numbers as the library's functions take them."""
    return "\n".join(f"{name}={number}" for name, number in fields.items())


def lists_of(
    rows: Any, dims: int, sequences: Sequence[int] | None, counts: Sequence[int] | None
) -> tuple[bytes, bytes]:
    """The bytes of a call's sequences (int32) and counts (int64): of rows [B, n, ..], which have `dims`
    dimensions, or of rows [T, ..] with counts."""
    if len(rows.shape) != dims - (counts is not None):
        raise ValueError(
            f"rows have {len(rows.shape)} dimensions: {dims}, or {dims - 1} with counts, are accepted"
        )
    if counts is None:
        counts = [rows.shape[1]] * rows.shape[0]
    lengths = numbers_of("counts", counts, "q")
    chosen = numbers_of("sequences", range(len(lengths) // 8) if sequences is None else sequences, "i")
    if len(chosen) * 2 != len(lengths):
        raise ValueError(f"{len(chosen) // 4} sequences and {len(lengths) // 8} counts: as many are accepted")
    return chosen, lengths
