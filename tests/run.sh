#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Runs the tests and ends with one line `N passed, N failed`, counting cmocka's cases and each other check as one.
#   tests/run.sh check   the quick tests in the build of the preset "test" (under two minutes)
#   tests/run.sh test    everything else but .ci/run's other stages (about 13 minutes on two cores, half compiling)
#   tests/run.sh tidy    clang-tidy (about a minute)
#   tests/run.sh numpy   the Python package with NumPy alone, on the build of the preset "test"
#   tests/run.sh tsan    data races: what runs tasks in parallel, under the thread sanitizer (about 2 minutes)
#   tests/run.sh cuda    the GPU's kernels, compiled and inspected where nvcc is (about 4 minutes)
set -u
cd "$(dirname "$0")/.." || exit 1
jobs=$(nproc)
passed=0
failed=0
log=$(mktemp)
export OMP_WAIT_POLICY=passive # threads that spin would only take the processors from other work
# Freed memory is kept and taken again, where glibc would map and clear large blocks anew for every case.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296
export CUDAARCHS=${CUDAARCHS:-90a-real} # a build configured here compiles for one GPU, which registers.sh looks at
trap 'rm -f "$log"' EXIT

# count NAME COMMAND...: one check.
count() {
    local name=$1 code=0 spent
    shift
    spent=$({ time "$@" >"$log" 2>&1; } 2>&1) || code=$?
    if [[ $code == 0 ]]; then
        passed=$((passed + 1))
        echo "ok      $name: $(seconds "$spent")"
    else
        failed=$((failed + 1))
        echo "FAILED  $name"
        tail -n 40 "$log"
    fi
}

TIMEFORMAT='%R %U %S'
# seconds TIME: wall and CPU, of what bash's time said.
seconds() {
    awk '{ printf "%.1f s, CPU %.1f s", $1, $2 + $3 }' <<<"$1"
}

# build PRESET [TARGET...]: with the tests; all, or only the targets named.
build() {
    local preset=$1
    shift
    cmake --preset "$preset" -B "$(folder "$preset")" -DQUERN_TESTS=ON >/dev/null &&
        cmake --build "$(folder "$preset")" -j"$jobs" ${1:+--target "$@"}
}

# folder PRESET: where it is built. The portable build goes on from bare's, which has compiled the same objects.
folder() {
    echo "build/${1/#portable/bare}"
}

# compile PRESET: without tests, to see that it compiles, links and installs; test compiles the same with -O3. It
# starts without a cache: libraries that the portable build has found are not there for bare.
compile() {
    rm -f "build/$1/CMakeCache.txt"
    cmake --preset "$1" "-DCMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG" >/dev/null && cmake --build "build/$1" -j"$jobs"
}

# lacks_left_out: every symbol that libquern_cuda lacks, but for glibc's and the weak ones, is defined in a source that
# was left out. A template is named with its result before it, and its types as the compiler has them.
lacks_left_out() {
    local source object name left_out=() bad=0
    while read -r source; do
        object=${source#src/cuda/}
        [[ -e build/cuda/cuda/${object//[\/.]/_}.o ]] || left_out+=("$source")
    done < <(find src/cuda -name '*.cu')
    while read -r name; do
        grep -qE "^[a-z].* $name(\\(| = )" /dev/null "${left_out[@]}" && continue
        echo "libquern_cuda lacks $name"
        bad=1
    done < <(nm -D -C --undefined-only build/cuda/libquern_cuda.so.? | grep -v -e '@GLIBC' -e ' w ' | sed 's/^ *U //; s/(.*//; s/^\(quern_status\|unsigned long\) //; s/__nv_bfloat16/bf16/')
    return $bad
}

compile_kernels() {
    cmake --preset cuda >/dev/null && cmake --build build/cuda -j"$jobs" --target quern_cuda
}

# without PATTERN...: the names of all test programs but those that match.
without() {
    local name pattern
    for name in build/test/tests/*_test; do
        name=${name##*/}
        for pattern in "$@"; do
            # shellcheck disable=SC2053
            [[ $name == $pattern ]] && continue 2
        done
        echo "$name"
    done
}

# programs PRESET NAME...: runs test programs of a build, two at a time since most of a test's time is one thread's, and
# adds up cmocka's cases.
programs() {
    local preset=$1 dir out name
    dir=$(folder "$1")/tests
    shift
    out=$(mktemp -d)
    (for name in "$@"; do
         while (($(jobs -rp | wc -l) >= 2)); do wait -n; done
         ({ time CMOCKA_MESSAGE_OUTPUT=stdout "$dir/$name" >"$out/$name" 2>&1; echo "$?" >"$out/$name.code"; } 2>"$out/$name.time"
          touch "$out/$name.end") &
     done
     wait) &
    for name in "$@"; do
        local code good bad
        until [[ -e $out/$name.end ]]; do sleep 0.1; done
        code=$(cat "$out/$name.code")
        good=$(grep -c '^\[       OK \]' "$out/$name")
        bad=$(grep '^\[  FAILED  \] [a-z0-9_]*$' "$out/$name" | sort -u | wc -l) # cmocka lists them again at the end
        [[ $code != 0 && $bad == 0 ]] && bad=1
        passed=$((passed + good))
        failed=$((failed + bad))
        if [[ $bad == 0 ]]; then
            echo "ok      $preset $name: $good cases, $(seconds "$(cat "$out/$name.time")")"
        else
            echo "FAILED  $preset $name (exit code $code)"
            grep -v -e '^\[       OK' -e '^\[ RUN' "$out/$name" | head -n 60
        fi
    done
    wait
    rm -rf "$out"
}

# lacking: the CPU levels that this machine lacks, a line each: the tests go through the others.
lacking() {
    local level
    while read -r level; do
        QUERN_CPU=$level build/test/quern info >/dev/null 2>"$log" || echo "not tested: $(tail -n 1 "$log")"
    done < <(sed -n 's/^LEVEL([0-9]*, "\([^"]*\)".*/\1/p' src/cpu/levels.inc)
}

# numpy: the Python package's tests that need no framework, with pytest's cases added up.
numpy() {
    local code=0 good bad spent
    spent=$({ time QUERN_BUILT=build/test python/tests/run.sh --numpy >"$log" 2>&1; } 2>&1) || code=$?
    if [[ $code == 0 ]] && grep '^python: .* skipped$' "$log"; then return; fi
    good=$(grep -oE '[0-9]+ passed' "$log" | tail -n 1 | cut -d' ' -f1)
    bad=$(grep -oE '[0-9]+ (failed|errors?)' "$log" | tail -n 2 | awk '{ s += $1 } END { print s + 0 }')
    [[ $code != 0 && $bad == 0 ]] && bad=1
    passed=$((passed + ${good:-0}))
    failed=$((failed + bad))
    if [[ $bad == 0 ]]; then
        echo "ok      Python with NumPy: ${good:-0} cases, $(seconds "$spent")"
    else
        echo "FAILED  Python with NumPy (exit code $code)"
        tail -n 60 "$log"
    fi
}

# small: checks of which most take one processor only.
small() {
    local script
    count "build: bare" compile bare
    for script in consumers abi; do
        count "$script: test" tests/$script/run.sh test
        count "$script: bare" tests/$script/run.sh bare
    done
    count "make installs and builds what it may" tests/make/run.sh
    count "a path with spaces" tests/make/space.sh
    count "the direction of includes" tests/layers.sh
    count "the length of functions" tests/lengths.sh
    count "links and pieces of C in the pages" tests/docs.sh
}

# kernels: the GPU's, compiled for one dtype and head dim, since nothing here runs them.
kernels() {
    count "build: cuda" compile_kernels
    if ! compgen -G 'build/cuda/cuda/*.log' >/dev/null; then
        echo "no nvcc: the GPU's kernels are not compiled"
        return
    fi
    count "registers of the GPU's kernels" tests/registers.sh build/cuda
    count "machine code of the GPU's kernels" tests/sass.sh build/cuda
    grep '^no cuobjdump' "$log" || true
    # It was linked without --no-undefined: what it lacks is what was left out.
    count "the GPU's library lacks what was left out alone" lacks_left_out
}

# races: data races, on three threads; libomp's Archer tells the sanitizer of its barriers.
races() {
    local program threaded=(core_test replays_test kept_calls_test attention_test attention_exact_test nsa_determinism_test)
    count "build: tsan" build tsan "${threaded[@]}"
    export OMP_NUM_THREADS=3 TSAN_OPTIONS=ignore_noninstrumented_modules=1 # libomp's own locks are not the library's
    for program in "${threaded[@]}"; do QUERN_TEST_TRIALS=1/4 programs tsan "$program"; done
}

# beside FUNCTION COMMAND...: a function's checks beside a command that takes both processors, and after it.
beside() {
    local out good=0 bad=1
    out=$(mktemp)
    (passed=0 failed=0 log=$(mktemp)
     "$1"
     rm -f "$log"
     echo "$passed $failed" >"$out.counts") >"$out" 2>&1 &
    shift
    "$@"
    wait
    read -r good bad <"$out.counts"
    passed=$((passed + good))
    failed=$((failed + bad))
    cat "$out"
    rm -f "$out" "$out.counts"
}

# finish: the last line, and the exit code.
finish() {
    times >"$log"
    echo "$SECONDS s, CPU $(awk 'NR == 2 { for (i = 1; i <= 2; i++) { split($i, t, "m"); s += 60 * t[1] + t[2] }; printf "%.0f", s }' "$log") s"
    echo "$passed passed, $failed failed"
    [[ $failed == 0 ]]
    exit
}

case ${1:-test} in
cuda) kernels; finish ;;
tsan) races; finish ;;
tidy)
    cmake --preset test >/dev/null
    count "clang-tidy" tests/tidy.sh 30000 build/test
    finish
    ;;
numpy)
    count "build: test" build test quern
    numpy
    finish
    ;;
esac
count "build: test" build test
lacking
mapfile -t quick < <(without '*_full_test' 'mock_*')
programs test "${quick[@]}"
# Programs with the mock device in a GPU's place (tests/mock): a few calls of each family, the others in the long run.
mocked=(mock_{device,steps,attention_views,cache,nsa_decode,nsa_lists,dsv4_index_pages,dsv4_compress,moe_route,nvfp4_gemm,linear_rows}_test)
QUERN_TEST_TRIALS=1/64 programs test "${mocked[@]}"
if [[ ${1:-test} == test ]]; then
    mapfile -t long < <(cd build/test/tests && ls -- *_full_test)
    programs test "${long[@]}"
    mapfile -t long < <(cd build/test/tests && ls -- mock_*_test | grep -vxF "$(printf '%s\n' "${mocked[@]}")")
    QUERN_TEST_TRIALS=1/64 programs test "${long[@]}"
    # Checks, files, drivers and an eighth of the random trials; the oracle is not under test here. Of those left out by
    # name two go through one kernel's whole grid, which the drivers call too, large scores take the paths of others, and
    # one brings an allocator of its own.
    mapfile -t sanitized < <(without '*_full_test' 'mock_*' 'oracle_*' '*large_scores_test' gemm_test \
                                     compress_linear_test command_memory_test)
    beside small count "build: asan-ubsan" build asan-ubsan "${sanitized[@]}"
    QUERN_TEST_TRIALS=1/8 programs asan-ubsan "${sanitized[@]}"
    # A build without the x86 levels; release goes through the portable kernels with everything else.
    mapfile -t portable < <(cd tests && ls -- kernels/*_test.c families/*/*golden_test.c core/core_test.c | sed 's|.*/||; s|\.c$||')
    count "build: portable" build portable "${portable[@]}"
    programs portable "${portable[@]}"
fi
finish
