#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Installs to a temporary prefix, moves it, and uses it from there: the command runs, and examples/hello builds and runs
# by pkg-config and by find_package, against the shared and the static library. Then the _INIT macros
# and every installed header alone, as C11 and as C++17.
#   tests/consumers/run.sh [PRESET]   the build to install (release)
set -eu
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
preset=${1:-release}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
unset LD_LIBRARY_PATH
cmake --install "$root/build/$preset" --prefix "$dir/first" >/dev/null
prefix=$dir/moved
mv "$dir/first" "$prefix"
pc=$(find "$prefix" -name quern.pc)
lib=$(realpath "${pc%/*}/..")
export PKG_CONFIG_PATH=$lib/pkgconfig
fail() {
    echo "$*"
    exit 1
}

# Nothing that was installed names a folder of the build or of the sources, or another library folder than its own.
mapfile -t plugin < <(find "$root/build/$preset" -maxdepth 1 -name 'libquern_cuda.so*')
grep -rlF "$root" "$prefix" "${plugin[@]}" && fail "these files name $root"
while read -r file; do
    runpath=$(readelf -d "$file" | sed -n 's/.*(R\(UN\)\?PATH).*\[\(.*\)\]/\2/p')
    case $file in
    */bin/*) [[ $runpath == "\$ORIGIN/../${lib##*/}" ]] || fail "${file##*/} looks for libraries in '$runpath'" ;;
    *) [[ -z $runpath ]] || fail "${file##*/} looks for libraries in $runpath" ;;
    esac
done < <(find "$prefix" "${plugin[@]}" -path '*/bin/*' -o -name '*.so*' ! -name libquern_dnnl.so)
if [[ -e $prefix/bin/quern ]]; then "$prefix/bin/quern" info; fi

# The manual page has every verb; completions know verbs, operations, their options and an option's values.
# completed WORDS...: what bash offers for the last of the words.
completed() (
    # shellcheck disable=SC1091
    source "$prefix/share/bash-completion/completions/quern"
    COMP_WORDS=("$@")
    COMP_CWORD=$(($# - 1))
    _quern quern "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    echo "${COMPREPLY[*]}"
)
if [[ -e $prefix/bin/quern ]]; then
    for verb in INFO RUN QUANTIZE COMPARE INSPECT BENCH PROBE; do
        grep -q "^.SH $verb\$" "$prefix/share/man/man1/quern.1" || fail "quern.1 has no section $verb"
    done
    [[ $(completed quern qu) == quantize ]] || fail "qu: $(completed quern qu)"
    [[ $(completed quern run nsa-sel) == nsa-select ]] || fail "run nsa-sel: $(completed quern run nsa-sel)"
    [[ $(completed quern run nsa --select-b) == --select-block ]] || fail "$(completed quern run nsa --select-b)"
    [[ $(completed quern run nsa a b --device "") == "cpu cuda" ]] || fail "$(completed quern run nsa a b --device "")"
fi
for file in LICENSE README.md docs/run.md examples/hello/hello.c; do
    [[ -e $prefix/share/doc/quern/$file ]] || fail "no $file is installed"
done

read -ra shared < <(pkg-config --cflags --libs quern)
read -ra static < <(pkg-config --static --cflags --libs quern)
hello=$root/examples/hello
compile=(gcc -std=c11 -Wall -Wextra -Wshadow -Wstrict-prototypes -Werror)
"${compile[@]}" "$hello/hello.c" -o "$dir/hello" "${shared[@]}" -lm
LD_LIBRARY_PATH=$lib "$dir/hello"
"${compile[@]}" product.c -o "$dir/product" "${shared[@]}" -lm
LD_LIBRARY_PATH=$lib "$dir/product"
g++ -std=c++17 -Wall -Wextra -Wshadow -Wpedantic -Werror product.cpp -o "$dir/product_cpp" "${shared[@]}"
LD_LIBRARY_PATH=$lib "$dir/product_cpp"

# The static library in a program that is not: with oneDNN, to which its references are weak, though the linker drops
# libraries that nothing needs.
needs_onednn() {
    ! grep -q dnnl "$pc" || readelf -d "$1" | grep -q 'NEEDED.*libdnnl' || fail "${1##*/} is linked without oneDNN"
}
read -ra partly < <(pkg-config --static --cflags --libs quern | sed 's/-lquern /-l:libquern.a /')
"${compile[@]}" -DQUERN_STATIC product.c -o "$dir/partly" -Wl,--as-needed "${partly[@]}"
needs_onednn "$dir/partly"
"$dir/partly"

# A program that is static altogether: without oneDNN where that has no archive, as on Debian. The GPU's library cannot
# be loaded into it, and the refusal says why.
compile+=(-static -DQUERN_STATIC)
"${compile[@]}" "$hello/hello.c" -o "$dir/whole" "${static[@]}"
readelf -l "$dir/whole" | grep -q INTERP && fail "-static made a program that needs shared libraries"
"$dir/whole"
"${compile[@]}" product.c -o "$dir/whole_product" "${static[@]}"
"$dir/whole_product"
"${compile[@]}" gpu.c -o "$dir/gpu" "${static[@]}"
"$dir/gpu" | grep 'linked statically' || fail "a static program's call for a GPU: $("$dir/gpu")"

cmake -S "$hello" -B "$dir/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed >/dev/null
cmake --build "$dir/build"
needs_onednn "$dir/build/hello_static"
"$dir/build/hello"
"$dir/build/hello_static"

# The short examples, and a model for the one that reads one: four experts in bf16, and the same in NVFP4.
cmake -S "$root/examples/short" -B "$dir/short" -DCMAKE_PREFIX_PATH="$prefix" >/dev/null
cmake --build "$dir/short"
for program in pool train decode layer nsa; do "$dir/short/$program"; done
# What needs a GPU is compiled where CUDA's toolkit is, and not run.
if command -v nvcc >/dev/null; then
    toolkit=$(realpath "$(nvcc --dryrun -c none.cu 2>&1 | sed -n 's/^#$ TOP=//p')")
    cmake -S "$root/examples/cuda" -B "$dir/cuda" -DCMAKE_PREFIX_PATH="$prefix" -DCUDAToolkit_ROOT="$toolkit" >/dev/null
    cmake --build "$dir/cuda"
fi
for program in "$root"/examples/{hello,short,cuda,python}/*.{c,py}; do
    [[ ! -e $program ]] || [[ $(wc -l <"$program") -le 120 ]] || fail "$program is longer than 120 lines"
done
header="" at=0
for part in {0..3}.{gate,up,down}; do
    header+=",\"model.layers.0.mlp.experts.${part}_proj.weight\":{\"dtype\":\"BF16\",\"shape\":[64,64],"
    header+="\"data_offsets\":[$at,$((at += 8192))]}"
done
header="{${header#,}}"
{
    # shellcheck disable=SC2059
    printf "\\x$(printf %02x $((${#header} % 256)))\\x$(printf %02x $((${#header} / 256)))\\0\\0\\0\\0\\0\\0"
    printf %s "$header"
    yes "$(printf '\x80\x3c\x10\xbd\x40\x3d\x20')" | tr -d '\n' | head -c $at
} >"$dir/model.safetensors"
"$dir/short/experts" "$dir/model.safetensors"
if [[ -e $prefix/bin/quern ]]; then
    "$prefix/bin/quern" quantize "$dir/model.safetensors" "$dir/nvfp4" --format modelopt >/dev/null
    "$dir/short/experts" "$dir/nvfp4" 0 1
fi

mkdir "$dir/components"
for component in quern static other; do
    printf 'cmake_minimum_required(VERSION 3.25)\nproject(c LANGUAGES C)\nfind_package(quern REQUIRED COMPONENTS %s)\n' \
        $component >"$dir/components/CMakeLists.txt"
    code=0
    cmake -S "$dir/components" -B "$dir/components/$component" -DCMAKE_PREFIX_PATH="$prefix" >"$dir/out" 2>&1 || code=$?
    if [[ $component == other ]]; then
        [[ $code != 0 ]] && grep -q "quern and static are" "$dir/out" || fail "find_package: $(cat "$dir/out")"
    elif [[ $code != 0 ]]; then
        fail "find_package(quern COMPONENTS $component): $(cat "$dir/out")"
    fi
done
include=$prefix/include
while read -r init; do
    grep -q "CHECK(.*, $init);" inits.c || fail "inits.c lacks $init"
done < <(sed -n 's/^#define \(QUERN_[A-Z0-9_]*_INIT\)\b.*/\1/p' "$include"/quern/*.h)
gcc -std=c11 -Wall -Wextra -Wpedantic -Werror -I"$include" inits.c -o "$dir/inits"
"$dir/inits"
g++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -I"$include" -x c++ inits.c -o "$dir/inits"
"$dir/inits"
printf '#include <quern/quern.hpp>\n' >"$dir/alone.cpp"
g++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -I"$include" -fsyntax-only "$dir/alone.cpp"
for header in "$include"/quern/*.h; do
    printf '#include <quern/%s>\n' "$(basename "$header")" >"$dir/alone.c"
    gcc -std=c11 -Wall -Wextra -Wstrict-prototypes -Werror -I"$include" -fsyntax-only "$dir/alone.c"
    g++ -std=c++17 -Wall -Wextra -Werror -I"$include" -fsyntax-only -x c++ "$dir/alone.c"
    printf 'extern "C" {\n#include <quern/%s>\n}\n' "$(basename "$header")" >"$dir/wrapped.c"
    g++ -std=c++17 -Wall -Wextra -Werror -I"$include" -fsyntax-only -x c++ "$dir/wrapped.c"
done
