#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Builds the library, the command, examples/v4 and the GPU's tests. Needs no cmocka; without jansson there is neither command
# nor example.
#   tests/gpu/build.sh [BUILD]: the build's folder (build/gpu)
cd "$(dirname "$0")/../.." || exit 1
build=${1:-build/gpu}
cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DQUERN_GPU_TESTS=ON \
    -DCMAKE_CUDA_ARCHITECTURES="${CUDAARCHS:-90a-real}" >/dev/null || exit 1
cmake --build "$build" -j"$(nproc)" >"$build/build.log" 2>&1 || {
    grep -n -A12 -e 'error[: ]' -e '\*\*\*' "$build/build.log" | head -n 60
    echo "0 passed, 1 failed"
    exit 1
}
echo "built in $SECONDS s"
