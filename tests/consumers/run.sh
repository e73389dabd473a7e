#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Installs to a temporary prefix and builds an outside program both ways: pkg-config and find_package, against the
# shared and the static library. Then every installed header alone, as C11 and as C++17.
set -eu
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cmake --install "$root/build/release" --prefix "$dir/prefix" >/dev/null
lib=$(dirname "$(find "$dir/prefix" -name quern.pc)")/..
export PKG_CONFIG_PATH=$lib/pkgconfig LD_LIBRARY_PATH=$lib
flags=$(PKG_CONFIG_ALLOW_SYSTEM_LIBS=1 pkg-config --define-variable=prefix="$dir/prefix" --cflags --libs quern)
# shellcheck disable=SC2086
gcc -std=c11 -Wall -Wextra -Werror consumer.c -o "$dir/pkg" $flags
"$dir/pkg"
cmake -S . -B "$dir/build" -DCMAKE_PREFIX_PATH="$dir/prefix" >/dev/null
cmake --build "$dir/build"
"$dir/build/with_shared"
env -u LD_LIBRARY_PATH "$dir/build/with_static"
for header in "$dir"/prefix/include/quern/*.h; do
    echo "#include <quern/$(basename "$header")>" >"$dir/alone.c"
    gcc -std=c11 -Wall -Wextra -Wstrict-prototypes -Werror -I"$dir/prefix/include" -fsyntax-only "$dir/alone.c"
    g++ -std=c++17 -Wall -Wextra -Werror -I"$dir/prefix/include" -fsyntax-only -x c++ "$dir/alone.c"
done
