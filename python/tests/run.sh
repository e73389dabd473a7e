#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Tests the Python package as a user gets it: from its source distribution, in a virtual environment of its own, which is
# kept in build/ with what is installed there as long as neither the sources nor the pinned versions change.
# usage: run.sh [pytest's arguments]; run.sh --prepare: makes the environment alone, and fails without PyTorch.
set -eu
cd "$(dirname "$0")/../.."
venv=$PWD/build/python-venv
export PIP_DISABLE_PIP_VERSION_CHECK=1 CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}

say() { echo "python: $*"; }
command -v python3 >/dev/null && python3 -c 'import ensurepip, venv' 2>/dev/null ||
    { say "no python3 with venv (Debian: python3-venv): its tests are skipped"; [[ ${1:-} != --prepare ]]; exit; }

# kept NAME KEY: whether NAME was done with this key.
kept() { [[ -e $venv/$1.key && $(<"$venv/$1.key") == "$2" ]]; }

# quietly COMMAND...: its output only where it fails.
quietly() { "$@" >"$venv/log" 2>&1 || { cat "$venv/log"; return 1; }; }
torch() { "$venv/bin/python" -c 'import torch' 2>/dev/null; }

pinned=$(python3 -V; cat python/tests/requirements*.txt)
if ! kept packages "$pinned"; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" download -q --no-deps -d "$venv" "$(head -n 1 python/tests/requirements.txt)" 2>/dev/null ||
        { say "no package index is reached: its tests are skipped"; [[ ${1:-} != --prepare ]]; exit; }
    quietly "$venv/bin/pip" install -r python/tests/requirements.txt
    echo "$pinned" >"$venv/packages.key"
fi
torch || quietly "$venv/bin/pip" install -r python/tests/requirements-torch.txt >/dev/null || true
! torch || "$venv/bin/python" -c 'import transformers' 2>/dev/null ||
    quietly "$venv/bin/pip" install -r python/tests/requirements-peers.txt >/dev/null || true
torch || say "no CPU PyTorch ($(<python/tests/requirements-torch.txt)) in the package index: its tests are skipped"

rm -rf build/python-sdist
quietly "$venv/bin/python" -m build --sdist --outdir build/python-sdist python
sdist=$(echo build/python-sdist/*.tar.gz)
sum=$(sha256sum <"$sdist")
if ! kept quern "$sum"; then
    quietly "$venv/bin/pip" install --force-reinstall --no-deps -C cmake.define.QUERN_CUDA=OFF "$sdist"
    echo "$sum" >"$venv/quern.key"
fi
[[ ${1:-} != --prepare ]] || { torch; exit; }
exec "$venv/bin/pytest" -q -p no:cacheprovider -c python/pyproject.toml --rootdir python python/tests "$@"
