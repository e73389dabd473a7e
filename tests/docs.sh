#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Every link of a page names a file that there is, the guide's pieces of C compile, and every header and every
# module of Python its page of the reference. (The pieces of python.md run in the Python tests.)
set -eu
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
bad=0
while read -r page; do
    while read -r link; do
        [[ $link == http* || $link == \#* || -e ${page%/*}/${link%%#*} ]] && continue
        echo "$page: no $link"
        bad=1
    done < <(sed 's/`[^`]*`//g' "$page" | grep -oE '\]\([^) ]+\)' | sed 's/^](//; s/)$//')
done < <(find docs -name '*.md'; ls README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md examples/lm/README.md | sed 's|^[^/]*$|./&|')
pieces=0
for page in docs/guide.md docs/engines.md; do
    awk -v to="$dir/${page##*/}" '/^```c$/ { n++; file = to n ".c"; next } /^```$/ { file = "" } file { print > file }' "$page"
done
for piece in "$dir"/*.c; do
    { printf '#include <quern/attention.h>\n#include <stdio.h>\nvoid piece(void);\nvoid piece(void)\n{\n'
      cat "$piece"
      echo '}'; } >"$dir/whole.c"
    gcc -std=c11 -Wall -Wextra -Werror -Wno-unused -Iinclude -fsyntax-only -x c "$dir/whole.c" || bad=1
    pieces=$((pieces + 1))
done
[[ $pieces -ge 2 ]] || { echo "the guide has $pieces pieces of C"; bad=1; }
for header in include/quern/*.h; do
    name=$(basename "$header" .h)
    grep -q "doxygenfile:: $name.h" "docs/reference/c-$name.md" || { echo "no page of $name.h"; bad=1; }
done
while read -r module; do
    grep -q "automodule:: $module\$" docs/reference/python.md || { echo "no page of $module"; bad=1; }
done < <(cd python && ls quern/__init__.py quern/[a-z]*.py quern/{compat,integrations}/[a-z]*.py quern/reference/__init__.py |
             sed 's|/__init__||; s|/|.|g; s|\.py$||')
exit $bad
