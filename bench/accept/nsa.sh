#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What NSA must reach on the CPU. usage: nsa.sh [BUILD_DIRECTORY]
set -u
build=${1:-build/release}
code=0
"$build/quern" accept nsa || code=1

# The demonstration's training step, NSA over dense: a few steps of each, in turns.
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
step() { # ATTENTION: the median step in milliseconds
    "$build/lm" train --attention "$1" --steps 12 --pieces 1 --save-every 0 --checkpoint "$out/model" --json "$out/result" >/dev/null 2>&1 &&
        sed -n 's/.*"ms_step_median": \([0-9.]*\).*/\1/p' "$out/result"
}
best=0
for _ in 1 2 3; do
    best=$(awk -v b="$best" -v d="$(step dense)" -v n="$(step nsa)" 'BEGIN { r = n > 0 ? d / n : 0; print (r > b ? r : b) }')
    awk -v b="$best" 'BEGIN { exit !(b >= 1.3) }' && break
done
verdict=PASS
awk -v b="$best" 'BEGIN { exit !(b >= 1.3) }' || { verdict=FAIL; code=1; }
printf '%-74s target %s %-8s measured %-8.3g %-8s %s\n' "demo: NSA's training step over dense's, context 4096, heads of 32, T 1" '>=' 1.3 "$best" x "$verdict"
exit $code
