#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# The assembler's report of each .cu for sm_90a, which the build keeps, against src/cuda/registers.txt: of every kernel
# listed there the instance with the most registers, stack and spilt bytes may not exceed the row, and a row without a
# kernel is an error.   tests/registers.sh [--print]: the table as measured
set -eu
cd "$(dirname "$0")/.."
table=src/cuda/registers.txt
measured=$(cat build/release/cuda/*.log | awk '
    /Compiling entry function/ { split($0, part, "\047"); name = part[2]; target = part[4]; next }
    /bytes stack frame/ { stack = $1; spill = $5 }
    /Used [0-9]+ registers/ && target == "sm_90a" {
        for (i = 1; i < NF; i++) if ($i == "Used") registers = $(i + 1)
        # _Z <length><name>, or _ZN <length><namespace> ... <length><name>: the last of these names
        kernel = name
        while (match(kernel, /[0-9]+[a-z]/)) {
            length_ = substr(kernel, RSTART, RLENGTH - 1) + 0
            word = substr(kernel, RSTART + RLENGTH - 1, length_)
            kernel = substr(kernel, RSTART + RLENGTH - 1 + length_)
            if (name !~ /^_ZN/ || kernel !~ /^[0-9]/) break
        }
        if (registers > r[word]) r[word] = registers
        if (stack > s[word]) s[word] = stack
        if (spill > p[word]) p[word] = spill
        seen[word] = 1
    }
    END { for (w in seen) print w, r[w] + 0, s[w] + 0, p[w] + 0 }' | LC_ALL=C sort)
if [[ ${1:-} == --print ]]; then
    echo "$measured"
    exit
fi
[[ -n $measured ]] || { echo "no reports for sm_90a in build/release/cuda"; exit 1; }
awk 'NR == FNR { if ($0 !~ /^#/ && NF == 4) { r[$1] = $2; s[$1] = $3; p[$1] = $4 }; next }
     ($1 in r) { found[$1] = 1
                 if ($2 > r[$1] || $3 > s[$1] || $4 > p[$1]) { print $1 ": " $2 " registers, " $3 " stack, " $4 " spilt; at most " r[$1] ", " s[$1] ", " p[$1]; bad = 1 } }
     END { for (k in r) if (!(k in found)) { print k ": no such kernel"; bad = 1 }
           exit bad }' "$table" <(echo "$measured")
