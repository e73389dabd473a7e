#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# No function is longer than 100 lines. Those that still are stand below with the length they may have; the list only
# shrinks: a function that got longer fails, and so does a row that is not needed any more.
set -eu
cd "$(dirname "$0")/.."
allowed='
src/cuda/any/select/select.cuh select_blocks 353
src/cuda/any/attend/attend_forward.cu attend_forward 202
src/cuda/any/attend/attend_f32.cu attend_rows_f32 105
src/cuda/any/attend/attend_f32.cu attend_keys_f32 109
src/cuda/any/attend/attend_backward_keys.cu attend_backward_keys 181
src/cuda/any/attend/attend_backward_rows.cu attend_backward_rows 147
'
# A function's brace opens and closes in the first column; its name stands before the first parenthesis above that.
find src tools tests bench examples \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' \) -print0 | xargs -0 awk '
    FNR == 1 { open = 0 }
    /^[A-Za-z_].*\(/ { name = $0; gsub(/__launch_bounds__\([^()]*\)/, "", name); sub(/ *\(.*/, "", name); sub(/.*[ *&]/, "", name) }
    /^\{/ { open = FNR }
    /^\}/ && open { if (FNR - open + 1 > 100) print FILENAME, name, FNR - open + 1; open = 0 }' |
    awk -v allowed="$allowed" '
        BEGIN { rows = split(allowed, row, "\n")
                for (i = 1; i <= rows; i++) if (split(row[i], field, " ") == 3) most[field[1] " " field[2]] = field[3] }
        { key = $1 " " $2; seen[key] = 1 }
        !(key in most) { print $1 ": " $2 " has " $3 " lines, at most 100 are allowed"; bad = 1 }
        key in most && $3 > most[key] { print $1 ": " $2 " grew to " $3 " lines, " most[key] " are listed"; bad = 1 }
        END { for (key in most) if (!(key in seen)) { print key ": 100 lines or fewer: take its row off the list"; bad = 1 }
              exit bad }'
