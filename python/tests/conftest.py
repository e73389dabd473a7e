# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Golden vectors and bounds for the tests."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

VECTORS = pathlib.Path(__file__).parents[2] / "tests" / "vectors"


class Golden:
    """The tensors of a file of golden vectors, by name, as NumPy arrays or torch tensors."""

    def __init__(self, name: str) -> None:
        from safetensors import safe_open

        self._numpy = safe_open(str(VECTORS / f"{name}.safetensors"), "np")
        self._name = name

    def __getitem__(self, name):
        try:
            found = self._numpy.get_tensor(name)
        except TypeError:
            return self._widened(name)
        return found if found.dtype.name != "bfloat16" else found.astype(np.float32)

    def _widened(self, name):
        """A tensor of bf16, which NumPy lacks, as f32."""
        with open(VECTORS / f"{self._name}.safetensors", "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            described = json.loads(file.read(size))[name]
            assert described["dtype"] == "BF16"
            first, last = described["data_offsets"]
            file.seek(8 + size + first)
            halves = np.frombuffer(file.read(last - first), np.uint16)
        return (halves.astype(np.uint32) << 16).view(np.float32).reshape(described["shape"])

    def names(self):
        return set(self._numpy.keys())

    def torch(self, *names):
        from safetensors import safe_open

        with safe_open(str(VECTORS / f"{self._name}.safetensors"), "pt") as file:
            found = [file.get_tensor(name) for name in names]
        return found[0] if len(names) == 1 else found


def run_alone(code, *arguments, **environment):
    """Runs a program as if PyTorch were not installed, which tvm_ffi imports where it is: that takes
    seconds."""
    without = "import sys; sys.modules['torch'] = None\n"
    command = [sys.executable, "-c", without + code, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=300)


@pytest.fixture(name="run_alone")
def run_alone_fixture():
    return run_alone


@pytest.fixture
def golden():
    return Golden


def _array(x):
    return x.detach().float().cpu().numpy() if hasattr(x, "detach") else np.asarray(x)


def close(got, expected, bound):
    """Largest error over the largest expected value."""
    got, expected = _array(got), _array(expected)
    assert got.shape == expected.shape
    assert np.array_equal(np.isneginf(got), np.isneginf(expected))
    finite = np.isfinite(expected)
    got, expected = got[finite].astype(np.float64), expected[finite].astype(np.float64)
    error = np.abs(got - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-30)
    assert error <= bound, error


def near(got, expected, bound):
    """The relative L2 error, against a float64 reference of the same inputs."""
    got, expected = (x.detach().double() for x in (got, expected))
    assert got.shape == expected.shape
    error = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
    assert error <= bound, error


@pytest.fixture(name="close")
def close_fixture():
    return close


@pytest.fixture(name="near")
def near_fixture():
    return near
