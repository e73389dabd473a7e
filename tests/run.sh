#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Runs the tests and ends with one line `N passed, N failed`, counting cmocka's cases and each other check as one.
#   tests/run.sh check   the quick tests in the release build (under two minutes)
#   tests/run.sh test    everything that CI runs (under fifteen minutes on two cores)
set -u
cd "$(dirname "$0")/.." || exit 1
jobs=$(nproc)
passed=0
failed=0
log=$(mktemp)
export OMP_WAIT_POLICY=passive # threads that spin would only take the processors from other work
export CUDAARCHS=${CUDAARCHS:-90a-real} # a build configured here compiles for one GPU, which registers.sh looks at
trap 'rm -f "$log"' EXIT

# count NAME COMMAND...: one check.
count() {
    local name=$1
    shift
    if "$@" >"$log" 2>&1; then
        passed=$((passed + 1))
        echo "ok      $name"
    else
        failed=$((failed + 1))
        echo "FAILED  $name"
        tail -n 40 "$log"
    fi
}

# build PRESET [TARGET...]: with the tests; all, or only the targets named.
build() {
    local preset=$1
    shift
    cmake --preset "$preset" -DQUERN_TESTS=ON >/dev/null && cmake --build "build/$preset" -j"$jobs" ${1:+--target "$@"}
}

# compile PRESET: without tests.
compile() {
    cmake --preset "$1" >/dev/null && cmake --build "build/$1" -j"$jobs"
}

# programs BUILD PATTERN [NOT]: runs the test programs of a build whose names match, two at a time since most of a test's
# time is one thread's, and adds up cmocka's cases.
programs() {
    local dir=build/$1/tests out name names=()
    out=$(mktemp -d)
    for name in "$dir"/*_test; do
        name=${name##*/}
        [[ $name == $2 && (${3:-} == '' || $name != $3) ]] && names+=("$name")
    done
    (for name in "${names[@]}"; do
         while (($(jobs -rp | wc -l) >= 2)); do wait -n; done
         (start=$SECONDS
          CMOCKA_MESSAGE_OUTPUT=stdout "$dir/$name" >"$out/$name" 2>&1
          echo "$? $((SECONDS - start))" >"$out/.$name"
          mv "$out/.$name" "$out/$name.end") &
     done
     wait) &
    for name in "${names[@]}"; do
        local code seconds good bad
        until [[ -e $out/$name.end ]]; do sleep 0.1; done
        read -r code seconds <"$out/$name.end"
        good=$(grep -c '^\[       OK \]' "$out/$name")
        bad=$(grep -c '^\[  FAILED  \] [a-z0-9_]*$' "$out/$name")
        [[ $code != 0 && $bad == 0 ]] && bad=1
        passed=$((passed + good))
        failed=$((failed + bad))
        if [[ $bad == 0 ]]; then
            echo "ok      $1 $name: $good cases, $seconds s"
        else
            echo "FAILED  $1 $name (exit code $code)"
            grep -v -e '^\[       OK' -e '^\[ RUN' "$out/$name" | head -n 60
        fi
    done
    wait
    rm -rf "$out"
}

count "build: release" build release
programs release '*' '*_full_test'
if [[ ${1:-test} == test ]]; then
    programs release '*_full_test'
    count "build: bare" compile bare
    for script in consumers abi; do
        count "$script: release" tests/$script/run.sh
        count "$script: bare" tests/$script/run.sh bare
    done
    count "make installs what it may" tests/make/run.sh
    if command -v aarch64-linux-gnu-gcc >/dev/null; then
        count "build: aarch64" compile aarch64
    else
        echo "no aarch64-linux-gnu-gcc: aarch64 is not compiled"
    fi
    if compgen -G 'build/release/cuda/*.log' >/dev/null; then
        count "registers of the GPU's kernels" tests/registers.sh
    else
        echo "no nvcc: the GPU's kernels are not compiled"
    fi
    count "build: asan-ubsan" build asan-ubsan
    programs asan-ubsan '*' '*_full_test'
    count "build: portable" build portable
    programs portable '*' '*_full_test'
    count "clang-tidy" tests/tidy.sh
    # Data races: what runs tasks in parallel, on three threads; libomp's Archer tells the sanitizer of its barriers.
    threaded=(core_test attention_test attention_exact_test nsa_determinism_test)
    count "build: tsan" build tsan "${threaded[@]}"
    export OMP_NUM_THREADS=3 TSAN_OPTIONS=ignore_noninstrumented_modules=1 # libomp's own locks are not the library's
    for program in "${threaded[@]}"; do programs tsan "$program"; done
fi
echo "$passed passed, $failed failed"
[[ $failed == 0 ]]
