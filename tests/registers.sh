#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# The assembler's report of each .cu for sm_90a, which the build keeps, against src/cuda/registers.txt: no instance of a
# kernel may exceed its row in registers, stack or spilt bytes.
#   tests/registers.sh [--print] [BUILD]: the table as measured; the build's folder (build/release)
set -eu
cd "$(dirname "$0")/.."
. tests/kernels.sh
# Of one instance in two files, the most.
measured=$(cat "$build"/cuda/*.log | awk '
    /Compiling entry function/ { split($0, part, "\047"); name = part[2]; target = part[4]; next }
    /bytes stack frame/ { stack = $1; spill = $5 }
    /Used [0-9]+ registers/ && target == "sm_90a" {
        for (i = 1; i < NF; i++) if ($i == "Used") print name, $(i + 1), stack, spill
    }' | kernel_names | awk '
    { if ($2 > r[$1]) r[$1] = $2; if ($3 > s[$1]) s[$1] = $3; if ($4 > p[$1]) p[$1] = $4; seen[$1] = 1 }
    END { for (w in seen) print w, r[w] + 0, s[w] + 0, p[w] + 0 }' | LC_ALL=C sort)
[[ -n $measured ]] || { echo "no reports for sm_90a in $build/cuda"; exit 1; }
compare "$measured" src/cuda/registers.txt registers "bytes of stack" "bytes spilt"
