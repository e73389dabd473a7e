#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What the GPU backend must reach, beside PyTorch on the same buffers. Without a GPU there is nothing to accept.
# usage: cuda.sh [BUILD_DIRECTORY]
set -eu
build=${1:-build/release}
if ! "$build/quern" info --device cuda >/dev/null 2>&1; then
    echo "cuda: no GPU here, nothing is accepted"
    exit 0
fi
python3 -c 'import torch' 2>/dev/null || { echo "cuda: python3 with PyTorch is needed"; exit 1; }
exec python3 "$(dirname "$0")/../peers/accept.py" "$(realpath "$build")/libquern.so"
