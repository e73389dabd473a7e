# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Faults of data that calls report to a word."""

import threading

import numpy as np
import pytest

import quern


def attend(entry):
    """An attention to listed blocks; one list has an entry of its own."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 64, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    k_cmp, v_cmp = quern.nsa_compress(k, v, block_size=8)
    lists = quern.nsa_select(q, k_cmp, block_size=8, num_selected=4)[0].copy()
    lists[0, 1, 5, 0] = entry
    return quern.nsa_attend(q, k, v, k_cmp, v_cmp, lists, block_size=8, window=8)


def test_an_entry_out_of_range_is_reported():
    word = np.zeros(1, np.int32)
    with quern.status_word(word) as given:
        assert given is word
        attend(0)
        assert word[0] == 0 and quern.faults(word) == []
        attend(1000)
    assert word[0] == 1
    (sentence,) = quern.faults(word)
    assert "list" in sentence
    word[0] = 0
    attend(1000)  # nobody asks any more
    assert word[0] == 0


def test_bits_are_kept_and_named():
    word = np.array([256 | 16], np.int32)
    with quern.status_word(word):
        attend(1000)
    assert word[0] == 256 | 16 | 1
    sentences = quern.faults(word)
    assert len(set(sentences)) == 3 and all(sentences) and "page" in sentences[1]


def test_the_last_open_word_counts():
    outer, inner = np.zeros(1, np.int32), np.zeros(1, np.int32)
    with quern.status_word(outer):
        with quern.status_word(inner):
            attend(1000)
        assert inner[0] == 1 and outer[0] == 0
        with pytest.raises(RuntimeError, match="out of the block"):
            with quern.status_word(inner):
                raise RuntimeError("out of the block")
        attend(-2)
    assert inner[0] == 1 and outer[0] == 1


def test_calls_of_other_threads_report():
    word = np.zeros(1, np.int32)
    with quern.status_word(word):
        thread = threading.Thread(target=attend, args=(1000,))
        thread.start()
        thread.join()
    assert word[0] == 1


@pytest.mark.parametrize(
    "word", [np.zeros(1, np.int64), np.zeros(2, np.int32), np.array(0, np.int32), np.zeros((1, 1), np.int32)]
)
def test_a_word_of_another_kind_is_refused(word):
    with pytest.raises(ValueError, match=r"int32 \[1\] is accepted"):
        with quern.status_word(word):
            pass


def test_a_word_that_cannot_be_written_is_refused():
    word = np.zeros(1, np.int32)
    word.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        with quern.status_word(word):
            pass
    attend(1000)


def test_a_word_that_is_a_tensor_of_the_call_is_refused():
    memory = np.zeros((1, 64, 4, 16), np.float32)
    q, k, v = (np.zeros((1, 64, heads, 16), np.float32) for heads in (4, 2, 2))
    with quern.status_word(memory.reshape(-1)[:1].view(np.int32)):
        with pytest.raises(ValueError, match="exec.status shares memory with o"):
            quern.attention(q, k, v, out=memory)


def test_words_of_torch():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 64, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    k_cmp, v_cmp = quern.nsa_compress(k, v, block_size=8)
    lists = quern.nsa_select(q, k_cmp, block_size=8, num_selected=4)[0].clone()
    lists[0, 0, 3, 1] = 99
    o = quern.nsa_attend(q, k, v, k_cmp, v_cmp, lists, block_size=8, window=8)[1]
    word = torch.zeros(1, dtype=torch.int32)
    with quern.status_word(word):
        o.sum().backward()
    assert quern.faults(word) == quern.faults(np.array([1], np.int32))
