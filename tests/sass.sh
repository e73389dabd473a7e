#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# The machine code of the kernels in src/cuda/sm90, against src/cuda/sass.txt: of each instance how many products of
# warpgroups it has (HGMMA), how many instructions reach local memory, and in its shortest loop with products how many
# move a value from a vector register to a uniform one. Without the instructions that it should have, or with more than
# it may, it fails. A row without its instance is an error, but for f16's and other head dims' where the build has none
# of f16. Needs cuobjdump and nvdisasm: those on PATH or beside nvcc, else PyPI's in build/sass-venv, else nothing is
# looked at.
#   tests/sass.sh [--print] [BUILD]: the table as measured; the build's folder (build/release)
set -eu
cd "$(dirname "$0")/.."
. tests/kernels.sh
print=0
if [[ ${1:-} == --print ]]; then
    print=1
    shift
fi
build=${1:-build/release}
table=src/cuda/sass.txt
venv=build/sass-venv
nvcc=$(readlink -f "$(command -v nvcc || echo nvcc)")
export PATH=$PATH:${nvcc%/*}
if ! command -v cuobjdump >/dev/null || ! command -v nvdisasm >/dev/null; then
    if [[ ! -e $venv/done ]]; then
        python3 -m venv "$venv" >/dev/null &&
            "$venv/bin/pip" install -q --disable-pip-version-check 'nvidia-cuda-cuobjdump>=13,<14' \
                'nvidia-cuda-nvdisasm>=13,<14' && touch "$venv/done" ||
            { echo "no cuobjdump: machine code is not looked at"; exit 0; }
    fi
    tools=("$PWD/$venv"/lib/python3*/site-packages/nvidia/cu13/bin)
    export PATH=$PATH:${tools[0]}
fi

# instances OBJECT...: a line for each kernel: its mangled name, products, accesses to local memory, moves.
instances() {
    local object
    for object in "$@"; do cuobjdump -sass "$object"; done | awk '
        function finish() { if (name != "") print name, products, memory, best == 0 ? 0 : moved }
        /Function : / { finish(); name = $NF; n = products = memory = moves = best = moved = 0; split("", at); next }
        /^ +\/\*[0-9a-f]+\*\/ / {
            address = substr($1, 3, length($1) - 4)
            at[address] = ++n
            products += / HGMMA/
            memory += / (LDL|STL)/
            moves += / R2UR /
            product_at[n] = products
            move_at[n] = moves
            if (!match($0, / BRA[^;]* 0x[0-9a-f]+/)) next
            target = substr($0, RSTART, RLENGTH)
            sub(/.* 0x/, "", target)
            while (length(target) < 4) target = "0" target
            if (!(target in at)) next
            first = at[target]
            if (products - product_at[first] < 4 || (best > 0 && n - first >= best)) next
            best = n - first
            moved = moves - move_at[first]
        }
        END { finish() }'
}
objects=("$build"/cuda/sm90_*.o)
[[ -e ${objects[0]} ]] || { echo "no kernels for sm_90a in $build/cuda"; exit 1; }
measured=$(printf '%s\n' "${objects[@]}" | xargs -P "$(nproc)" -n 4 bash -c "$(declare -f instances); instances \"\$@\"" _ |
    kernel_names | LC_ALL=C sort)
if [[ $print == 1 ]]; then
    echo "$measured"
    exit
fi
awk 'NR == FNR { if ($0 !~ /^#/ && NF == 4) { p[$1] = $2; m[$1] = $3; u[$1] = $4 }; next }
     { found[$1] = 1; if ($1 ~ /[<,]f16[,>]/) f16 = 1 }
     !($1 in p) { print $1 ": no row in the table: " $2 " products, " $3 " accesses, " $4 " moves"; bad = 1; next }
     $2 < p[$1] || $3 > m[$1] || $4 > u[$1] { print $1 ": " $2 " products, " $3 " accesses, " $4 " moves; at least " p[$1] ", at most " m[$1] " and " u[$1]; bad = 1 }
     END { for (k in p) if (!(k in found) && (f16 || k !~ /[<,](f16|64|192|256)[,>]/)) { print k ": no such kernel"; bad = 1 }
           exit bad }' "$table" <(echo "$measured")
