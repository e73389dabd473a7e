#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Whether two builds hold the same machine code for sm_90a, kernel by kernel, whatever file and namespace a kernel is in.
# Prints those that differ (<: as in OLD, >: as in NEW; checksum and length of the instructions), and fails if any does.
#   tests/same_sass.sh OLD NEW [OBJECTS]: the builds' folders; a pattern of the names of NEW's objects. With a pattern,
#   kernels that only OLD has are not named.
set -eu
old=$(realpath "$1") new=$(realpath "$2") objects=${3:-*}
cd "$(dirname "$0")/.."
. tests/kernels.sh
find_disassembler || exit 1

# sums OBJECT...: a line for each kernel: its mangled name, a checksum of its instructions' text and encoding, a length.
sums() {
    local object name text
    for object in "$@"; do cuobjdump -sass -arch sm_90a "$object"; done | awk '
        function finish() { if (name != "") print name, text }
        /Function : / { finish(); name = $NF; text = ""; next }
        /^ +\/\*/ { gsub(/ /, ""); text = text $0 }
        END { finish() }' |
        while read -r name text; do echo "$name $(cksum <<<"$text")"; done
}
kernels() {
    find "$1/cuda" -name "$2.o" -print0 | xargs -0 -P "$(nproc)" -n 4 bash -c "$(declare -f sums); sums \"\$@\"" _ |
        kernel_names | LC_ALL=C sort
}
before=$(kernels "$old" '*') after=$(kernels "$new" "$objects")
differ=$(diff <(echo "$before") <(echo "$after") | grep "^[<>]" || true)
if [[ $objects != '*' ]]; then
    only_old=$(awk 'NR == FNR { there[$1]; next } /^</ && !($2 in there)' <(echo "$after") <(echo "$differ"))
    differ=$(grep -vxF -e "$only_old" <<<"$differ" || true)
fi
echo "$(wc -l <<<"$after") kernels compared"
[[ -z $differ ]] || { echo "$differ"; exit 1; }
