#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What one more optional tensor of an operation touches: each patch here adds one, from the public header to the CPU's
# kernel. The patches must apply, the library must build with them, and none may change more than six files outside
# stages, kernels and tests. Whoever changes what a patch changes makes the patch anew.
set -eu
cd "$(dirname "$0")/../.."
most=6
bad=0
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/src"
git ls-files -z | xargs -0 cp --parents -t "$tree/src"
git init -q "$tree/src"
for patch in "$PWD"/tests/adding/*.patch; do
    name=$(basename "$patch" .patch)
    if ! git -C "$tree/src" apply "$patch"; then
        echo "$name does not apply"
        bad=1
        continue
    fi
    files=$(git apply --numstat "$patch" | cut -f3 | grep -cvE '^(src/stages|src/cpu|src/cuda|tests)/' || true)
    echo "$name: $files files outside stages, kernels and tests"
    ((files <= most)) || bad=1
done
if ! (cd "$tree/src" && cmake --preset release -DQUERN_CUDA=OFF -B "$tree/build" &&
      cmake --build "$tree/build" -j"$(nproc)" --target quern) >"$tree/log" 2>&1; then
    echo "the library does not build with them"
    tail -n 20 "$tree/log"
    bad=1
fi
[[ $bad == 0 ]]
