#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Runs the GPU's small test programs under compute-sanitizer's memcheck, racecheck and synccheck, side by side, and ends
# with `N passed, N failed`, one for each program and tool: one call of under nine minutes on a machine with a GPU.
#   QUERN_GPU_TESTS       patterns of the programs to run (all but those left out below)
#   QUERN_SANITIZE_TOOLS  the tools (racecheck memcheck synccheck)
#   QUERN_SANITIZE_LIMIT  seconds that a program may take under a tool (400)
#   QUERN_RACE_KERNELS    what the names of the kernels hold that racecheck follows (sm90; '_' is all)
# Left out: nsa_large, offsets and passes, whose gigabytes are about time and 64-bit offsets, not more code. racecheck is the
# slowest by far. It follows the kernels whose warps meet at barriers of their own, not at __syncthreads() alone: the others
# take it tens of minutes. It runs the programs that between them launch these on every path, and each launch once (bridge.c
# repeats it for its bits).
set -u
jobs=$(nproc)
cd "$(dirname "$0")/../.." || exit 1
export NVCC_APPEND_FLAGS="-lineinfo -DQUERN_RACECHECK ${NVCC_APPEND_FLAGS:-}" # reports name source lines
tests/gpu/build.sh || exit 1
sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$(readlink -f "$(command -v nvcc)")")/compute-sanitizer")
"$sanitizer" --version | tail -n 1 || exit 1
logs=build/gpu/sanitize
mkdir -p $logs
rm -f $logs/*
# Fewer random trials: a tool slows a kernel up to a hundred times, and each of its paths has to run once only.
export OMP_NUM_THREADS=1 QUERN_TEST_TRIALS=${QUERN_TEST_TRIALS:-10}
passed=0
failed=0
names=()
limit=${QUERN_SANITIZE_LIMIT:-400}
raced=' attention_test house_test nsa_lists_test nsa_parts_test nsa_property_test nsa_nonfinite_test shared_test replay_test variants_test dsv4_attention_test dsv4_cached_test dsv4_index_test '
for tool in ${QUERN_SANITIZE_TOOLS:-racecheck memcheck synccheck}; do
    for program in build/gpu/tests/gpu_*_test; do
        name=${program##*/gpu_}
        [[ $name == nsa_large_test || $name == offsets_test || $name == passes_test ]] && continue
        chosen=no
        for pattern in ${QUERN_GPU_TESTS:-'*'}; do
            # shellcheck disable=SC2053
            [[ $name == $pattern ]] && chosen=yes
        done
        [[ $chosen == yes ]] || continue
        [[ $tool != racecheck || $raced == *" $name "* ]] || continue
        names+=("$tool-$name")
        # house_test asks for more memory than there is, on purpose: the runtime's refusal is no finding.
        options=()
        [[ $tool == memcheck && $name == house_test ]] && options=(--report-api-errors no)
        [[ $tool == racecheck ]] && options=(--kernel-regex "kns=${QUERN_RACE_KERNELS:-sm90}")
        while (($(jobs -rp | wc -l) >= jobs)); do wait -n; done
        (begin=$SECONDS
         [[ $tool == racecheck ]] && export QUERN_GPU_RUNS=1 QUERN_TEST_TRIALS=4
         left=$((520 - begin)) # so that the call ends within nine minutes
         timeout $((left < limit ? left > 0 ? left : 1 : limit)) "$sanitizer" --tool "$tool" "${options[@]}" --error-exitcode 9 --print-limit 20 "$program" >"$logs/$tool-$name" 2>&1
         echo "exit code $? after $((SECONDS - begin)) s" >>"$logs/$tool-$name") &
    done
done
wait

# clean LOG: nothing was found. racecheck does not follow how cuBLASLt's kernels wait for their copies: races that lie in
# these alone are not Quern's. (To leave out kernels by name instead makes the tool itself fail.)
clean() {
    grep -Eq '^=+ (ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\))' "$1" && return
    awk '/^=+ +(Error: Race reported between|and) .* access at / { if (/ access at (nvjet_|[a-z0-9_]*cutlass)/) theirs++; else ours++ }
         /^=+ Error:|^=+ Warning:/ { reports++ }
         /^=+ RACECHECK SUMMARY: / { displayed = $4 }
         END { exit !(displayed > 0 && displayed < 20 && reports == displayed && ours == 0 && theirs >= 2 * displayed) }' "$1"
}

for name in "${names[@]}"; do
    log=$logs/$name
    end=$(tail -n 1 "$log")
    if [[ $end == 'exit code '[09]' '* ]] && clean "$log" && grep -Eq '^[1-9][0-9]* passed, 0 failed$' "$log"; then
        passed=$((passed + 1))
        echo "ok      $name ($(grep -E '^[0-9]+ passed' "$log" | tail -n 1); ${end#exit code ? })"
    else
        failed=$((failed + 1))
        echo "FAILED  $name ($end)"
        grep -E -A7 '^=+ (Error|Warning|Invalid|Barrier|Program|ERROR|RACECHECK)|^FAILED|passed, ' "$log" | head -n 24 | cut -c1-240
    fi
done
echo "$SECONDS s"
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
