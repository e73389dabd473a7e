#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Whether two builds hold the same machine code for sm_90a, kernel by kernel, whatever file and namespace a kernel is in.
# Prints those that differ (<: as in OLD, >: as in NEW; checksum and length of the instructions), and fails if any does.
#   tests/same_sass.sh OLD NEW [OBJECTS OLD-OBJECTS]: the builds' folders; patterns of objects' names, without .o
set -eu
old=$(realpath "$1") new=$(realpath "$2")
cd "$(dirname "$0")/.."
. tests/kernels.sh
find_disassembler || exit 1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# kernels BUILD OBJECTS: a line for each kernel: its name, a checksum of its instructions and their encoding, a length.
kernels() {
    local object n=0
    mkdir "$work/text"
    for object in "$1"/cuda/$2.o; do
        n=$((n + 1))
        cuobjdump -sass -arch sm_90a "$object" | awk -v to="$work/text/$n" '
            /Function : / { close(file); file = to "." ++k; print $NF > (to ".names"); next }
            /^ +\/\*/ { print > file }'
        [[ ! -e $work/text/$n.names ]] || for k in $(seq "$(wc -l <"$work/text/$n.names")"); do echo "$work/text/$n.$k"; done |
            xargs cksum | cut -d' ' -f1,2 | paste -d' ' "$work/text/$n.names" -
    done | kernel_names | LC_ALL=C sort
    rm -rf "$work/text"
}
kernels "$old" "${4:-${3:-*}}" >"$work/old"
kernels "$new" "${3:-*}" >"$work/new"
echo "$(wc -l <"$work/new") kernels compared"
! diff "$work/old" "$work/new" | grep "^[<>]"
