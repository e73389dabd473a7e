#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What products with NVFP4 weights and the quantisers must reach on the CPU. usage: nvfp4.sh [BUILD_DIRECTORY]
set -u
build=${1:-build/release}
cmake --build "$build" --target accept_nvfp4 >/dev/null && "$build/accept_nvfp4"
