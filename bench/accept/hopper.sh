#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What attention must reach on one H200, dense and NSA, beside cuDNN's dense attention in the same process. Without a GPU
# there is nothing to accept. Takes some ten minutes, of which dense attention over 1M tokens is three.
# usage: hopper.sh [BUILD_DIRECTORY]     QUERN_ACCEPT_PARTS: names of the parts to run (all)
set -eu
build=${1:-build/release}
if ! "$build/quern" info --device cuda >/dev/null 2>&1; then
    echo "hopper: no GPU here, nothing is accepted"
    exit 0
fi
python3 -c 'import torch' 2>/dev/null || { echo "hopper: python3 with PyTorch is needed"; exit 1; }
exec python3 "$(dirname "$0")/../peers/hopper.py" "$(realpath "$build")/libquern.so"
