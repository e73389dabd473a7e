#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# clang-tidy over the library, the command and the example, from the release build's compile commands.
set -eu
cd "$(dirname "$0")/.."
# One file a process: with several, clang-tidy 14 takes every va_list after the first file for uninitialized.
find src tools examples bench -name '*.c' | sort | xargs -P "$(nproc)" -n 1 clang-tidy-14 -p build/release --quiet \
    --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-optimization-argument --extra-arg=-Wno-psabi
