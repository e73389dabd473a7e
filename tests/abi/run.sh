#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# The exported symbols are those of symbols.txt, in both libraries; a change there is a change of the ABI. The
# SONAME carries the ABI's number.
#   tests/abi/run.sh [PRESET]   the build to look at (release)
set -eu
cd "$(dirname "$0")"
preset=${1:-release}
build=../../build/$preset
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
nm -D --defined-only "$build/libquern.so" | awk '{print $3}' | sort >"$dir/shared"
nm -g --defined-only "$build/static/libquern.a" | awk 'NF == 3 {print $3}' | sort >"$dir/static"
# (quern_op_*, of op.h, is listed too, but promised by no version.)
diff symbols.txt "$dir/shared"
diff symbols.txt "$dir/static"
! objdump -p "$build/libquern.so" | grep 'NEEDED *libjansson'
objdump -p "$build/libquern.so" | grep -q 'SONAME *libquern.so.0$'
