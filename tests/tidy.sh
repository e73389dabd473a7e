#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# clang-tidy over the library, the command and the example, from the release build's compile commands.
set -eu
cd "$(dirname "$0")/.."
# Files over compiler vector types wider than clang's baseline are read under their own level's flags.
git ls-files 'src/*.c' 'tools/*.c' 'examples/*.c' | xargs -P "$(nproc)" -n 4 clang-tidy-14 -p build/release --quiet \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument --extra-arg=-Wno-psabi
