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
code=0
python3 "$(dirname "$0")/../peers/accept.py" "$(realpath "$build")/libquern.so" || code=1

# The longest forward that fits the GPU, run.
tokens=$("$build/quern" probe nsa --device cuda --memory 130G --heads 8/2 --dim 128 --dtype bf16 --tile 128 --metric mean_logit --json |
    sed -n 's/.*"N": \([0-9]*\).*/\1/p')
verdict=PASS
[ "${tokens:-0}" -ge 16000000 ] || { verdict=FAIL; code=1; }
printf '%-78s target >= %-8s measured %-8s tokens   %s\n' "probe: longest forward, H 8/2, D 128, bf16, run within 130 GiB" 16e6 "${tokens:-0}" $verdict
exit $code
