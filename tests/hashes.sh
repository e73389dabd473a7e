#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Whether two builds compute the same bits: hashes of the tensors that the families' tests look at, at every CPU level,
# with 1 and with 3 threads.
#   tests/hashes.sh BUILD FILE [PATTERN]   writes the hashes of a build's test programs (of those that match) to a file
#   tests/hashes.sh compare FILE FILE      says where two such files differ
set -eu
cd "$(dirname "$0")/.."
if [[ $1 == compare ]]; then
    if cmp -s "$2" "$3"; then
        echo "$(wc -l <"$2") hashes, all equal"
        exit 0
    fi
    diff "$2" "$3" | head -n 40
    exit 1
fi
export OMP_WAIT_POLICY=passive
out=$(mktemp)
trap 'rm -f "$out"' EXIT
: >"$2"
for program in tests/families/*/*${3:-}*_test.c; do
    program=$(basename "$program" .c)
    for threads in 1 3; do
        : >"$out"
        if ! QUERN_TEST_HASH=$out QUERN_TEST_THREADS=$threads "$1/tests/$program" >"$out.log" 2>&1; then
            echo "$program failed with $threads threads"
            tail -n 20 "$out.log"
        fi
        rm -f "$out.log"
        sed "s/^/$program $threads /" "$out" >>"$2"
    done
done
echo "$(wc -l <"$2") hashes"
