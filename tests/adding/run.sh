#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What one more optional tensor of an operation touches: each patch here but one adds one, from the public header to the
# CPU's kernel. The patches must apply, the library must build with them, and none may change more than six files outside
# stages, kernels and tests. level.patch adds a level with one kernel of its own: it changes CMakeLists.txt, levels.inc and
# its own folder alone, and the tests of kernels pass there. Whoever changes what a patch changes makes the patch anew.
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
    if [[ $name == level ]]; then
        files=$(git apply --numstat "$patch" | cut -f3 |
            grep -cvE '^(CMakeLists\.txt|src/cpu/levels\.inc|src/cpu/one_kernel/.*)$' || true)
        echo "$name: $files files outside the build's, levels.inc and its own folder"
        ((files == 0)) || bad=1
        continue
    fi
    files=$(git apply --numstat "$patch" | cut -f3 | grep -cvE '^(src/stages|src/cpu|src/cuda|tests)/' || true)
    echo "$name: $files files outside stages, kernels and tests"
    ((files <= most)) || bad=1
done
if ! (cd "$tree/src" && cmake --preset test "-DCMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG" -DQUERN_CUDA=OFF -DQUERN_EXAMPLES=OFF \
          -B "$tree/build" &&
      cmake --build "$tree/build" -j"$(nproc)" --target quern row_kernels_test kernel_table_test &&
      "$tree/build/tests/kernel_table_test" && "$tree/build/tests/row_kernels_test" --bench row.add_scaled &&
      "$tree/build/tests/row_kernels_test" --bench row.add_scaled 2>/dev/null | grep -q one_kernel) >"$tree/log" 2>&1; then
    echo "the library does not build with them, or the kernels are wrong at the new level"
    tail -n 20 "$tree/log"
    bad=1
fi
[[ $bad == 0 ]]
