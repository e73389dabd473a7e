# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Sourced by the checks of the GPU's kernels, with their arguments: [--print] [BUILD]. Sets `print` and `build`.
print=0
if [[ ${1:-} == --print ]]; then
    print=1
    shift
fi
build=${1:-build/release}

# kernel_names: lines that begin with a kernel's mangled name, with the last component of its name instead, without
# parameters and blanks, and dtypes as the code calls them; numbers may follow.
kernel_names() {
    c++filt | sed -E 's/^void //; s/\(anonymous namespace\):://g; s/\([^()]*\)(( [0-9]+)+)$/\1/; s/^([a-z_0-9]+::)+//
                      s/__nv_bfloat16/bf16/g; s/__half/f16/g; s/, /,/g; s/> >/>>/g'
}

# compare MEASURED TABLE WHAT1 WHAT2 WHAT3: prints what was measured, or compares it with a table's rows of a name and
# three numbers, which are bounds from above; from below where a WHAT begins with +. An instance without a row is an
# error, and so is a row without its instance, but for f16's, f32's and other head dims' where the build has none of f16
# (QUERN_CUDA_ONE_DTYPE).
compare() {
    if [[ $print == 1 ]]; then
        echo "$1"
        return
    fi
    awk -v w2="$3" -v w3="$4" -v w4="$5" '
        function least(i) { return what[i] ~ /^\+/ }
        function unit(i) { return substr(what[i], 1 + least(i)) }
        BEGIN { what[2] = w2; what[3] = w3; what[4] = w4 }
        NR == FNR { if ($0 !~ /^#/ && NF == 4) { row[$1] = $0; for (i = 2; i <= 4; i++) bound[$1, i] = $i }; next }
        { found[$1] = 1; if ($1 ~ /[<,]f16[,>]/) f16 = 1 }
        !($1 in row) { print $1 ": no row in the table: " $2 " " unit(2) ", " $3 " " unit(3) ", " $4 " " unit(4); bad = 1; next }
        {
            for (i = 2; i <= 4; i++)
                if (least(i) ? $i < bound[$1, i] : $i > bound[$1, i]) {
                    print $1 ": " $i " " unit(i) ", at " (least(i) ? "least " : "most ") bound[$1, i]
                    bad = 1
                }
        }
        END {
            for (k in row)
                if (!(k in found) && (f16 || k !~ /[<,](f16|float|8|16|32|64|192|256)[,>]/)) { print k ": no such kernel"; bad = 1 }
            exit bad
        }' "$2" <(echo "$1")
}

# find_disassembler: puts cuobjdump and nvdisasm on PATH: those beside nvcc, else PyPI's in build/sass-venv.
find_disassembler() {
    local venv=build/sass-venv nvcc tools
    nvcc=$(readlink -f "$(command -v nvcc || echo nvcc)")
    export PATH=$PATH:${nvcc%/*}
    if command -v cuobjdump >/dev/null && command -v nvdisasm >/dev/null; then return; fi
    if [[ ! -e $venv/done ]]; then
        python3 -m venv "$venv" >/dev/null &&
            "$venv/bin/pip" install -q --disable-pip-version-check 'nvidia-cuda-cuobjdump>=13,<14' \
                'nvidia-cuda-nvdisasm>=13,<14' && touch "$venv/done" ||
            { echo "no cuobjdump: machine code is not looked at"; return 1; }
    fi
    tools=("$PWD/$venv"/lib/python3*/site-packages/nvidia/cu13/bin)
    export PATH=$PATH:${tools[0]}
}
