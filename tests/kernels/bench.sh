#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Times the CPU's kernels in the calls that their tests check, one level after the other: tests/kernels/bench.sh [PATTERN]
# takes those whose table.name holds the pattern. Work is bytes, or a product's multiply-adds.
set -eu -o pipefail
cd "$(dirname "$0")/../.."
for program in $(sed -n 's/.*"\([a-z0-9_]*_test\)".*/\1/p' src/cpu/kernels.inc | sort -u); do
    build/release/tests/"$program" --bench "${1-}" 2>/dev/null | sed -n '/^kernel /,$p'
done | awk '!/^kernel / || !seen++'
