# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""A call of an operation for every framework: torch's tensors go through torch.ops, all others straight to
the library."""

from __future__ import annotations

from typing import Any, Mapping

from . import _arrays
from . import _operations as ops


def run(
    name: str,
    settings: tuple[tuple[str, Any], ...],
    tensors: Mapping[str, Any],
    results: tuple[str, ...],
    *,
    keep: tuple[str, ...] = (),
    out: Mapping[str, Any] | None = None,
    asked: tuple[tuple[str, int], ...] = (),
) -> tuple[Any, ...]:
    """→ the results, in order. keep: what a backward may take beside what it needs. out: results that are
    given, and written where they stand; such a call has no gradient. asked: extents that no input says."""
    if out is not None:
        _arrays.need_plain(name, *tensors.values())
        tensors = {**tensors, **out}
    elif any(_arrays.is_torch(t) for t in tensors.values()):
        from . import _torch

        return _torch.run(name, settings, tensors, results, keep, asked)
    extents = dict(asked) if asked else None
    return ops.call(name, ops.params_of(name, settings), tensors, results, asked=extents)
