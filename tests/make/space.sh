#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# In a folder whose path has spaces, the rules of cmake/cuda.cmake compile, keep the report and link: with the smallest
# of the GPU's files that every configuration compiles, since every one has the same rule.
set -eu
cd "$(dirname "$0")/../.."
if ! command -v nvcc >/dev/null; then
    echo "no nvcc: the GPU's files are not compiled"
    exit
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
there="$dir/a path with spaces"
mkdir "$there"
cp -r CMakeLists.txt cmake src include "$there"
smallest=$(find src/cuda -name '*.cu' ! -path '*/sm90*' ! -path '*/instances/*' -printf '%s %P\n' | sort -n |
    sed -n '1s/^[0-9]* //p')
find "$there/src/cuda" -name '*.cu' ! -path "*/src/cuda/$smallest" -delete
build="$there/build"
cmake -S "$there" -B "$build" -DQUERN_TOOLS=OFF -DQUERN_EXAMPLES=OFF -DQUERN_CUDA_ONE_DTYPE=ON \
    -DCMAKE_CUDA_ARCHITECTURES=90a-real >/dev/null
cmake --build "$build" --target quern_cuda
object=${smallest//[\/.]/_}
for file in "cuda/$object.o" "cuda/$object.log" libquern_cuda.so.0; do
    [[ -s $build/$file ]] || { echo "$file is missing"; exit 1; }
done
cmake --build "$build" --target quern_cuda | grep Compiling && { echo "a second run compiles again"; exit 1; }
touch "$there/include/quern/quern.h"
cmake --build "$build" --target quern_cuda | grep Compiling || { echo "after a change of a header nothing is compiled"; exit 1; }
