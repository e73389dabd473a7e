#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# usage: costs.sh FOLDER KIND... - what kinds of attention cost: a table, FOLDER/costs.json, FOLDER/costs.svg.
# FOLDER/KIND.json is what `lm train --json` wrote, FOLDER/KIND.speed what `lm speed --json` wrote.
set -eu
out=$1
shift

field() { # FILE NAME
    sed -n "s/.*\"$2\": \"*\([^,\"}]*\).*/\1/p" "$1"
}

for kind in "$@"; do
    for context in 1k 4k 16k; do
        echo "${context%k}" "$(field "$out/$kind.speed" tokens_per_second_$context)" \
            "$(field "$out/$kind.speed" cache_bytes_$context)"
    done
    printf '\n\n'
done >"$out/costs.txt"

before='{"kinds": ['
for kind in "$@"; do
    printf '%s\n{"kind": "%s", %s, %s' "$before" "$kind" "$(sed 's/^{//; s/}$//' "$out/$kind.json")" \
        "$(sed 's/^{//' "$out/$kind.speed")"
    before=,
done >"$out/costs.json"
printf '\n]}\n' >>"$out/costs.json"

row='%-9s %9s %8s | %8s %8s %8s | %9s %9s %9s\n'
# shellcheck disable=SC2059
printf "$row" attention bits/byte ms/step tokens/s '' '' cache/KiB '' '' '' '' '' 1k 4k 16k 1k 4k 16k
for kind in "$@"; do
    mapfile -t at < <(sed '/^$/d' <<<"$(for c in 1k 4k 16k; do
        field "$out/$kind.speed" tokens_per_second_$c
        field "$out/$kind.speed" cache_bytes_$c
    done)")
    printf '%-9s %9.4f %8.1f | %8.0f %8.0f %8.0f | %9.0f %9.0f %9.0f\n' "$kind" \
        "$(field "$out/$kind.json" bits_per_byte)" "$(field "$out/$kind.json" ms_step_median)" \
        "${at[0]}" "${at[2]}" "${at[4]}" $((at[1] / 1024)) $((at[3] / 1024)) $((at[5] / 1024))
done
echo "tokens/s: a token is a byte, decoded from caches that hold 1k, 4k, 16k of them"

gnuplot >"$out/costs.svg" <<END || echo "no chart in $out/costs.svg, for gnuplot is missing or failed"
data = '$out/costs.txt'
kinds = '$*'
set terminal svg size 960,400 background '#ffffff' font 'sans-serif,13'
set multiplot layout 1,2
set logscale xy 2
set format y '%.0f'
set xlabel 'KiB of text before the byte'
set xrange [0.9:18]
set xtics (1, 4, 16)
set grid
set key left bottom
set ylabel 'bytes decoded a second'
plot for [i=1:words(kinds)] data index i-1 using 1:2 with linespoints lw 2 title word(kinds, i)
set key left top
set ylabel 'KiB in the caches'
plot for [i=1:words(kinds)] data index i-1 using 1:(\$3/1024) with linespoints lw 2 title word(kinds, i)
END
