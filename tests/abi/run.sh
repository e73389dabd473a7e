#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# The exported symbols are those of symbols.txt, in both libraries; a change there is a change of the ABI. The
# SONAME carries the ABI's number. The version is the same in the header, the builds and the changelog.
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
soname=libquern.so.$(sed -n 's/^set(QUERN_ABI \([0-9]*\).*/\1/p' ../../CMakeLists.txt)
objdump -p "$build/libquern.so" | grep -q "SONAME *$soname\$"

header=$(sed -n 's/^#define QUERN_VERSION_[A-Z]* \([0-9]*\)$/\1/p' ../../include/quern/quern.h | paste -sd.)
for other in "$(sed -n 's/^project(quern VERSION \([0-9.]*\).*/\1/p' ../../CMakeLists.txt)" \
             "$(sed -n 's/^version = "\(.*\)"$/\1/p' ../../python/pyproject.toml)" \
             "$(sed -n 's/^## \([0-9.]*\).*/\1/p' ../../CHANGELOG.md | head -n 1)"; do
    [[ $other == "$header" ]] || { echo "version $other is not the header's, $header"; exit 1; }
done
grep -m 1 '^## ' ../../CHANGELOG.md | grep -q ", $soname " || { echo "CHANGELOG.md says not $soname first"; exit 1; }
