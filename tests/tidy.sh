#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# clang-tidy over the library, the command and the example, from the compile commands of a build.
#   tests/tidy.sh [NODES [BUILD]]   how many states the analyzer may look at in a function (30000; clang's own is
#                                   225000); the build's folder (build/release)
# Nine tenths of the time are the analyzer's. It tries what it has not yet seen first, so more states take longer paths
# through the same code: of 864 blocks in five of the costliest files 30000 reach 850, and 225000 reach 853.
set -eu
nodes=${1:-30000}
build=${2:-build/release}
cd "$(dirname "$0")/.."
# One file a process, and one of the commands that compile it: with several, clang-tidy 14 takes every va_list after the
# first for uninitialized.
once=$(mktemp -d)
trap 'rm -rf "$once"' EXIT
python3 -c 'import json, sys
print(json.dumps(list({c["file"]: c for c in json.load(sys.stdin)}.values())))' \
    <"$build/compile_commands.json" >"$once/compile_commands.json"
# The programs of examples/cuda need CUDA's headers.
find src tools examples bench -name '*.c' ! -path 'examples/cuda/*' | sort |
    xargs -P "$(nproc)" -n 1 clang-tidy-14 -p "$once" --quiet \
    --extra-arg=-Xclang --extra-arg=-analyzer-config --extra-arg=-Xclang --extra-arg="max-nodes=$nodes" \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument --extra-arg=-Wno-psabi \
    2> >(grep -v '^[0-9]* warnings\? generated\.$' >&2)
