#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# No function is longer than 100 lines, no line of code longer than 110 characters; the page of figures is what a reader
# wants to know, and what was tried stands in docs/notes.
set -eu
cd "$(dirname "$0")/.."
# A function's brace opens and closes in the first column; its name stands before the first parenthesis above that.
find src tools tests bench examples \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -print0 | xargs -0 awk '
    FNR == 1 { open = 0 }
    /^[A-Za-z_].*\(/ { name = $0; gsub(/__launch_bounds__\([^()]*\)/, "", name); sub(/ *\(.*/, "", name); sub(/.*[ *&]/, "", name) }
    /^\{/ { open = FNR }
    /^\}/ && open {
        if (FNR - open + 1 > 100) { print FILENAME ": " name " has " FNR - open + 1 " lines, at most 100 are allowed"; bad = 1 }
        open = 0
    }
    END { exit bad }'
# Characters, not bytes. What pip has built in python/ is none of ours.
export LC_ALL=C.UTF-8
if find src tools tests bench examples include python -path python/build -prune -o -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.inc' -o -name '*.py' \) -print0 |
    xargs -0 grep -nE '^.{111,}'; then
    exit 1
fi
awk 'length($0) > 110 { print FILENAME ": line " FNR " is longer than 110 characters"; bad = 1 }
    END { if (FNR > 250) { print FILENAME " has " FNR " lines, at most 250 are allowed"; bad = 1 } exit bad }' docs/performance.md
