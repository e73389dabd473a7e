#!/bin/sh
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# A header with its comments as Doxygen's: /** before what they tell of, /**< behind it. A paragraph that has indented
# lines, as lists and pieces of C, keeps its lines.
sed -e '/SPDX-/d' -e 's,\(;\|\,\|= [0-9]*\) */\* ,\1 /**< ,' -e 's,^\( *\)/\* ,\1/** ,' -e 's,^/\*$,/**,' \
    -e 's,^ \* \([a-z0-9_]*\.h\) - , * @file \1\n * ,' "$1" | awk '
    function flush(  i) {
        if (kept) print start "@verbatim"
        for (i = 1; i <= lines; i++) print (kept ? "" : start) line[i]
        if (kept) print "@endverbatim"
        lines = kept = 0
    }
    /^ *\*( [^\/]|$)/ && !/@file/ {
        text = $0
        sub(/^ *\* ?/, "", text)
        start = substr($0, 1, index($0, "*")) " "
        if (text == "") {
            flush()
            print
            next
        }
        if (text ~ /^  /) kept = 1
        last = sub(/ *\*\/$/, "", text)
        line[++lines] = text
        if (last) {
            flush()
            print start "*/"
        }
        next
    }
    { flush(); print }
    END { flush() }'
