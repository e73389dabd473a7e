#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# The machine code of the kernels in folders sm90* of src/cuda, against src/cuda/sass.txt: of each instance how many
# products of warpgroups it has (HGMMA, QGMMA), how many instructions reach local memory, and in its shortest loop with products how many
# move a value from a vector register to a uniform one (R2UR). It may not have fewer of the first, nor more of the others.
# Needs cuobjdump and nvdisasm: those on PATH or beside nvcc, else PyPI's in build/sass-venv, else nothing is looked at.
#   tests/sass.sh [--print] [BUILD]: the table as measured; the build's folder (build/release)
set -eu
cd "$(dirname "$0")/.."
. tests/kernels.sh
find_disassembler || exit 0

# instances OBJECT...: a line for each kernel: its mangled name, products, accesses to local memory, moves.
instances() {
    local object
    for object in "$@"; do cuobjdump -sass "$object"; done | awk '
        function finish() { if (name != "") print name, products, memory, best == 0 ? 0 : moved }
        /Function : / { finish(); name = $NF; n = products = memory = moves = best = moved = 0; split("", at); next }
        /^ +\/\*[0-9a-f]+\*\/ / {
            address = substr($1, 3, length($1) - 4)
            at[address] = ++n
            products += / [HQ]GMMA/
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
objects=("$build"/cuda/*_sm90_*.o)
[[ -e ${objects[0]} ]] || { echo "no kernels for sm_90a in $build/cuda"; exit 1; }
measured=$(printf '%s\n' "${objects[@]}" | xargs -P "$(nproc)" -n 4 bash -c "$(declare -f instances); instances \"\$@\"" _ |
    kernel_names | LC_ALL=C sort)
compare "$measured" src/cuda/sass.txt +products "accesses to local memory" moves
