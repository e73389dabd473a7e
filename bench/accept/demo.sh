#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# What the demonstration must reach: one line per figure, non-zero exit on a FAIL.
set -u
cd "$(dirname "$0")/../.." || exit 1
start=$SECONDS
examples/lm/demo.sh || exit 1
took=$((SECONDS - start))
value() { sed -n "s/.*\"$2\": \([0-9.]*\).*/\1/p" "build/demo/$1.json"; }
failed=0
# line WHAT TARGET MEASURED CONDITION (an awk expression over t and m)
line() {
    local verdict=FAIL
    awk -v t="$2" -v m="$3" "BEGIN { exit !($4) }" && verdict=PASS
    [ $verdict = PASS ] || failed=1
    printf '%-62s %10s %10s  %s\n' "$1" "$2" "$3" $verdict
}
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.3f", a / b }'; }
nsa=$(value nsa bits_per_byte) dense=$(value dense bits_per_byte)
nsa_ms=$(value nsa ms_step_median) dense_ms=$(value dense ms_step_median)
printf '%-62s %10s %10s\n' what target measured
line "NSA, held-out bits per byte, at most" 2.80 "$nsa" "m <= t"
line "dense, held-out bits per byte, at most" 2.80 "$dense" "m <= t"
line "NSA over dense, bits per byte, at most" 1.03 "$(ratio "$nsa" "$dense")" "m <= t"
line "order-2 on the same bytes over NSA, bits per byte, at least" 1.00 "$(ratio "$(value order2 same_bytes)" "$nsa")" "m >= t"
line "dense step over NSA step, at least (1.3 is the next goal)" 1.00 "$(ratio "$dense_ms" "$nsa_ms")" "m >= t"
line "the whole demonstration in seconds, at most" 300 "$took" "m <= t"
exit $failed
