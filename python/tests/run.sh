#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Tests the Python package as a user gets it: from its source distribution, in a virtual environment of its own,
# which is kept in build/ with what is installed there as long as neither the sources nor the pinned versions
# change.
#   run.sh [pytest's arguments]
#   run.sh --prepare   makes the environment alone, and fails without PyTorch
#   run.sh --numpy     the tests that need no framework, from the tree, in an environment with NumPy alone; on the
#                      libquern of the build QUERN_BUILT (build/release)
set -eu
cd "$(dirname "$0")/../.."
# PyTorch and libquern have threads of their own. Those that wait spin unless told otherwise, which takes the
# processors from the others, and from other programs.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export PIP_DISABLE_PIP_VERSION_CHECK=1 CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
mode=${1:-}
venv=$PWD/build/python-venv
[[ $mode != --numpy ]] || venv=$PWD/build/numpy-venv

say() { echo "python: $*"; }

# skip WHY: ends the run, which is no failure where tests were asked for.
skip() {
    say "$*: its tests are skipped"
    [[ $mode != --prepare ]]
    exit
}

# kept NAME KEY: whether NAME was done with this key.
kept() { [[ -e $venv/$1.key && $(<"$venv/$1.key") == "$2" ]]; }

# quietly COMMAND...: its output only where it fails.
quietly() { "$@" >"$venv/log" 2>&1 || { cat "$venv/log"; return 1; }; }
torch() { "$venv/bin/python" -c 'import torch' 2>/dev/null; }

# environment REQUIREMENTS...: the virtual environment, with what the first file names; made anew where what these
# files pin has changed.
environment() {
    local pinned
    pinned=$(python3 -V; cat "$@")
    ! kept packages "$pinned" || return 0
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install -q -r "$1" >"$venv/log" 2>&1 || skip "no package index has $(paste -sd ' ' "$1")"
    echo "$pinned" >"$venv/packages.key"
}

# numpy_tests: with the package's files and a libquern_ffi built here.
numpy_tests() {
    local dir=$PWD/build/python-numpy # from the root: tests import the package in other folders, too
    environment python/tests/requirements.txt
    rm -rf "$dir/quern"
    mkdir -p "$dir"
    quietly cmake -S python -B "$dir/cmake" -DCMAKE_BUILD_TYPE=Release -DQUERN_BUILT="$PWD/${QUERN_BUILT:-build/release}" \
        -DPython_EXECUTABLE="$venv/bin/python"
    quietly cmake --build "$dir/cmake"
    cp -r python/quern "$dir"
    cp "$dir/cmake/quern_ffi.so" "$dir/quern"
    PYTHONPATH=$dir "$venv/bin/pytest" -q -p no:cacheprovider -c python/pyproject.toml --rootdir python python/tests
}

command -v python3 >/dev/null && python3 -c 'import ensurepip, venv' 2>/dev/null ||
    skip "no python3 with venv (Debian: python3-venv)"
if [[ $mode == --numpy ]]; then
    numpy_tests
    exit
fi
environment python/tests/requirements.txt python/tests/requirements-*.txt
torch || quietly "$venv/bin/pip" install -r python/tests/requirements-torch.txt >/dev/null || true
! torch || "$venv/bin/python" -c 'import transformers' 2>/dev/null ||
    quietly "$venv/bin/pip" install -r python/tests/requirements-peers.txt >/dev/null || true
! torch || [[ -e $venv/oldest ]] ||
    quietly "$venv/bin/pip" install --no-deps --target "$venv/oldest" \
        -r python/tests/requirements-oldest.txt >/dev/null || true
! torch || "$venv/bin/python" -c 'import compressed_tensors, gguf' 2>/dev/null ||
    quietly "$venv/bin/pip" install -r python/tests/requirements-quantize.txt >/dev/null || true
"$venv/bin/python" -c 'import jax' 2>/dev/null ||
    quietly "$venv/bin/pip" install -r python/tests/requirements-jax.txt >/dev/null || true
torch || say "no CPU PyTorch ($(<python/tests/requirements-torch.txt)) in the package index: its tests are skipped"

rm -rf build/python-sdist
quietly "$venv/bin/python" -m build --sdist --outdir build/python-sdist python
sdist=$(echo build/python-sdist/*.tar.gz)
sum=$(sha256sum <"$sdist")
if ! kept quern "$sum"; then
    quietly "$venv/bin/pip" install --force-reinstall --no-deps -C cmake.define.QUERN_CUDA=OFF "$sdist"
    echo "$sum" >"$venv/quern.key"
fi
[[ $mode != --prepare ]] || { torch; exit; }
tests() { "$venv/bin/pytest" -q -p no:cacheprovider -c python/pyproject.toml --rootdir python "$@"; }
if [[ $# -gt 0 || ! -e $venv/oldest ]]; then
    tests python/tests "$@"
    exit
fi
# The integration's tests also with the oldest transformers that it takes, but for those that take longest.
failed=0
tests python/tests || failed=1
say "$(<python/tests/requirements-oldest.txt):"
PYTHONPATH=$venv/oldest tests python/tests/test_accelerate.py python/tests/test_transformers*.py \
    -k 'not compiled_generation and not fine_tuning and not inductor' || failed=1
exit $failed
