#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What dense attention, and NSA's slice beside it, must reach. usage: attention.sh [BUILD_DIRECTORY]
set -u
build=${1:-build/release}
code=0
"$build/quern" accept attention || code=1
cmake --build "$build" --target accept_error >/dev/null && "$build/accept_error" || code=1
exit $code
