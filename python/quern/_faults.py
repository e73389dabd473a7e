# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Faults in the data of calls: the word that they are reported to, and what its bits say."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

from . import _arrays
from ._operations import library

_lock = threading.Lock()
_words: list[Any] = []  # those of the contexts that are open


def _report_to_last() -> None:
    library.report_to(_arrays.exported(_words[-1]) if _words else None)


@contextlib.contextmanager
def status_word(word: Any) -> Iterator[Any]:
    """Within, calls or the bits of the faults that they find in their inputs' data into `word`, int32 [1] on
    their device. A call on another device is refused. Of contexts that are open, in any thread, the one that
    was entered last counts: PyTorch runs backward passes on threads of its own. A graph keeps the word with
    which it was captured.
    """
    _arrays.need_writable("word", word)
    if tuple(word.shape) != (1,) or str(word.dtype).removeprefix("torch.") != "int32":
        raise ValueError(f"word is {word.dtype} {list(word.shape)}: int32 [1] is accepted")
    with _lock:
        _words.append(word)
        _report_to_last()
    try:
        yield word
    finally:
        with _lock:
            del _words[max(i for i, open_word in enumerate(_words) if open_word is word)]
            _report_to_last()


def faults(word: Any) -> list[str]:
    """What the bits of a word say, a sentence each; waits for the word's device."""
    bits = int(word[0])
    return [str(library.fault_name(1 << i)) for i in range(31) if bits >> i & 1]
