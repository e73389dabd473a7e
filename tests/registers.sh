#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# The assembler's report of each .cu for sm_90a, which the build keeps, against src/cuda/registers.txt: no instance of a
# kernel may exceed its row in registers, stack or spilt bytes; an instance without a row is an error, and so is a row
# without its instance, but for f16's, f32's and other head dims' where the build has none of f16
# (QUERN_CUDA_ONE_DTYPE).
#   tests/registers.sh [--print] [BUILD]: the table as measured; the build's folder (build/release)
set -eu
cd "$(dirname "$0")/.."
. tests/kernels.sh
print=0
if [[ ${1:-} == --print ]]; then
    print=1
    shift
fi
build=${1:-build/release}
table=src/cuda/registers.txt
# Of one instance in two files, the most.
measured=$(cat "$build"/cuda/*.log | awk '
    /Compiling entry function/ { split($0, part, "\047"); name = part[2]; target = part[4]; next }
    /bytes stack frame/ { stack = $1; spill = $5 }
    /Used [0-9]+ registers/ && target == "sm_90a" {
        for (i = 1; i < NF; i++) if ($i == "Used") print name, $(i + 1), stack, spill
    }' | kernel_names | awk '
    { if ($2 > r[$1]) r[$1] = $2; if ($3 > s[$1]) s[$1] = $3; if ($4 > p[$1]) p[$1] = $4; seen[$1] = 1 }
    END { for (w in seen) print w, r[w] + 0, s[w] + 0, p[w] + 0 }' | LC_ALL=C sort)
if [[ $print == 1 ]]; then
    echo "$measured"
    exit
fi
[[ -n $measured ]] || { echo "no reports for sm_90a in $build/cuda"; exit 1; }
awk 'NR == FNR { if ($0 !~ /^#/ && NF == 4) { r[$1] = $2; s[$1] = $3; p[$1] = $4 }; next }
     { found[$1] = 1; if ($1 ~ /[<,]f16[,>]/) f16 = 1 }
     !($1 in r) { print $1 ": no row in the table: " $2 " registers, " $3 " stack, " $4 " spilt"; bad = 1; next }
     $2 > r[$1] || $3 > s[$1] || $4 > p[$1] { print $1 ": " $2 " registers, " $3 " stack, " $4 " spilt; at most " r[$1] ", " s[$1] ", " p[$1]; bad = 1 }
     END { for (k in r) if (!(k in found) && (f16 || k !~ /[<,](f16|float|64|192|256)[,>]/)) { print k ": no such kernel"; bad = 1 }
           exit bad }' "$table" <(echo "$measured")
