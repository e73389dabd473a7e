#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# On a machine that lacks every package `make` builds, prints the line that would install them and installs nothing;
# the targets that promise it do install. Programs of our own stand for the packager's and for CMake. What builds the
# GPU's kernels otherwise than `make` does, builds them elsewhere; the demonstration builds none.
set -eu
cd "$(dirname "$0")/../.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
printf '#!/bin/sh\nexit 1\n' >"$dir/dpkg-query"
printf '#!/bin/sh\necho "$@" >>%s/calls\n' "$dir" >"$dir/apt-get"
printf '#!/bin/sh\necho 0\n' >"$dir/id"
printf '#!/bin/sh\necho "cmake $*"\n' >"$dir/cmake"
chmod +x "$dir/dpkg-query" "$dir/apt-get" "$dir/id" "$dir/cmake"
export PATH=$dir:$PATH
make all >"$dir/out" 2>&1
grep -q '^cmake --build build/release' "$dir/out"
grep -q 'apt-get install -y --no-install-recommends .*libjansson-dev' "$dir/out"
[[ ! -e $dir/calls ]] || { echo "make all called apt-get:"; cat "$dir/calls"; exit 1; }
for target in setup setup-dev; do
    rm -f "$dir/calls"
    make $target >/dev/null
    grep -q 'install .*libjansson-dev' "$dir/calls"
done
for target in demo demo-all test; do
    make -n $target | grep '^cmake/setup.sh .*libjansson-dev' >/dev/null
done
make -n demo | grep '^cmake --build build/release .*--target lm quern_command$' >/dev/null
if grep -n build/release tests/run.sh; then echo "make test uses the folder of make"; exit 1; fi
