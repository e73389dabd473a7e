#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# The direction of includes: a family drives stages through the backend's table, and nothing points back. Of another
# family only the public header may be named; the oracle shares nothing with the library, an example sees the API alone.
# And of kernels: none shares its name with another function of src/cuda.
# Where build/release holds the library's objects, the symbols that they use are looked at, too.
set -eu
cd "$(dirname "$0")/.."
bad=0

# forbid WHAT PATTERN PATH...: no file there has an #include whose argument matches.
forbid() {
    local what=$1 pattern=$2 found
    shift 2
    found=$(find "$@" -type f \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.inc' \) -print0 |
        xargs -0r grep -nE "^ *# *include +[<\"]($pattern)" || true)
    if [[ -n $found ]]; then
        printf '%s:\n%s\n' "$what" "$found"
        bad=1
    fi
}

families=()
for folder in src/*/; do
    folder=$(basename "$folder")
    case $folder in
    core | runtime | stages | cpu | cuda | cache | dist | io) ;;
    *) families+=("$folder") ;;
    esac
done
family=$(IFS='|'; echo "${families[*]}")
any_family="($family)/|quern/($family)\\.h"
mapfile -t own_headers < <(cd src && ls -- *.h)
tool_headers=$(cd tools/quern && printf '%s|' -- *.h | sed 's/\./\\./g; s/|$//; s/--|//')

forbid "core names a family" "$any_family" src/core
forbid "core names a backend" '(cpu|cuda)/' src/core
forbid "the runtime names a family" "$any_family" src/runtime
forbid "the runtime names a backend" '(cpu|cuda)/' src/runtime
forbid "a stage names a family" "$any_family" src/stages
forbid "a stage names a backend" '(cpu|cuda)/|backend\.h' src/stages
forbid "the backends' tables name a family" "$any_family" "${own_headers[@]/#/src/}"
forbid "the backends' tables name a backend" '(cpu|cuda)/' "${own_headers[@]/#/src/}"
forbid "a backend names a family" "$any_family" src/cpu src/cuda
forbid "one backend names the other" 'cuda/' src/cpu
forbid "one backend names the other" 'cpu/' src/cuda
for f in src/cpu/*/; do
    f=$(basename "$f")
    others=$(cd src/cpu && printf '%s\n' */ | grep -vxE "($f|kernels)/" | paste -sd'|')
    [[ -e src/cpu/$f/level.c ]] || forbid "the cpu's folder $f names another stage's or a level's" "cpu/($others)" "src/cpu/$f"
done
stages=$(cd src/cuda && printf '%s\n' */ | grep -vxE '(common|hopper|stages)/' | paste -sd'|')
mapfile -t any_gpu < <(find src/cuda -mindepth 2 -type f ! -path '*/sm90*' ! -path 'src/cuda/hopper/*')
forbid "what CUDA's kernels share names a stage's kernels" "($stages)|variants\\.cuh" src/cuda/common src/cuda/hopper
forbid "any GPU's kernels name Hopper's" 'hopper/|([a-z0-9_]+/)*sm90' "${any_gpu[@]}"
for f in "${families[@]}"; do
    others=$(printf '%s\n' "${families[@]}" | grep -vx "$f" | paste -sd'|')
    forbid "family $f names a backend" '(cpu|cuda)/' "src/$f"
    forbid "family $f names another's inside" "($others)/" "src/$f"
done
forbid "the cache names a family or a backend" "$any_family|(cpu|cuda)/" src/cache
forbid "io names a family or a backend" "$any_family|(cpu|cuda)/|backend\\.h" src/io
forbid "bench names the command" "(tools/.*|$tool_headers)\"" bench
forbid "the oracle names the library's inside" '(core|runtime|stages|cpu|cuda|io|cache)/|backend\.h'"|($family)/" tests/oracle
forbid "an include climbs out of its folder" '\.\./.*' src bench tools examples tests include
forbid "the API names what is inside" '(core|runtime|stages|cpu|cuda|io|cache)/|backend\.h'"|($family)/" include
forbid "the library names the command, a benchmark or a test" '(tools|bench|tests|oracle|support)/' src
forbid "an example names more than the API" '(core|runtime|stages|cpu|cuda|io|cache)/|backend\.h'"|($family)/" examples

# A profiler names a kernel: `git grep -w` then finds one function.
shared=$(comm -12 <(sed -nE 's/^([a-z_0-9]+).*( [0-9]+){3}$/\1/p' src/cuda/registers.txt | sort -u) \
    <(grep -rhE --include='*.cu' --include='*.cuh' '^(static|inline|__device__)' src/cuda | grep -v __global__ |
        sed -nE 's/^[^(]*\b([a-z_0-9]+)\(.*/\1/p' | sort -u))
if [[ -n $shared ]]; then
    printf 'a kernel and another function of src/cuda have one name:\n%s\n' "$shared"
    bad=1
fi

# symbols OPTION FOLDER...: the global ones that nm lists of the folders' objects.
objects=build/release/CMakeFiles/quern_plain.dir
symbols() {
    local option=$1 source
    shift
    find "${@/#/src/}" -name '*.c' | while read -r source; do
        if [[ -e $objects/$source.o ]]; then echo "$objects/$source.o"; fi
    done | xargs -r nm -g "$option" | awk 'NF > 1 { print $NF }' | sort -u
}

# apart WHAT FROM TO...: no object of a folder uses a symbol that objects of the others define, but those of quern.h.
names=$(grep -oE '\bquern_[a-z_]+\(' include/quern/quern.h | tr -d '(')
apart() {
    local what=$1 from=$2 found
    shift 2
    found=$(comm -12 <(symbols --undefined-only "$from") <(symbols --defined-only "$@" | grep -vxF "$names"))
    if [[ -n $found ]]; then
        printf '%s:\n%s\n' "$what" "$found"
        bad=1
    fi
}

if [[ -d $objects ]]; then
    for folder in core runtime cache cpu; do
        apart "$folder uses what a family defines" $folder "${families[@]}"
    done
    for folder in core runtime cache "${families[@]}"; do
        apart "$folder uses what the cpu's backend defines" "$folder" cpu
    done
fi
[[ $bad == 0 ]]
