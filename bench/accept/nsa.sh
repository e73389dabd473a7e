#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What NSA must reach on the CPU. usage: nsa.sh [BUILD_DIRECTORY]
set -u
build=${1:-build/release}
code=0
"$build/quern" accept nsa || code=1
exit $code
