#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Runs the GPU's small test programs under compute-sanitizer's tools, side by side, and says of each program and tool what
# came of it: ok, FAILED, `cut` (its time, or the call's, was over) or `not run`. The last line but two sums that up, the
# last is `N passed, N failed`, where what was cut or not run counts as failed.
#   tests/gpu/sanitize.sh                                 memcheck and synccheck of the library as it ships
#   QUERN_SANITIZE_TOOLS=racecheck tests/gpu/sanitize.sh  a build of its own, and by far the slowest
#   QUERN_GPU_TESTS         patterns of the programs to run (all but those left out below)
#   QUERN_SANITIZE_SECONDS  the whole call, the build included (530)
#   QUERN_SANITIZE_LIMIT    seconds that a program may take under a tool (300)
#   QUERN_RACE_KERNELS      what the names of the kernels hold that racecheck follows ('_' is all), for each program's own below
#   QUERN_TEST_TRIALS       trials and shares of grids (1/64: on an H200 memcheck takes 255 s of one program after the other)
# Left out: nsa_large, offsets and passes, whose gigabytes are about time and 64-bit offsets, not more code, and v4, whose model
# takes minutes under a tool for stages that the other programs run. Each launch runs once (bridge.c repeats it for its bits).
# racecheck follows the kernels whose warps meet at barriers of their own, not at __syncthreads() alone: the others take it
# tens of minutes. It runs the programs that between them launch these on every path. It does not follow that __syncwarp()
# orders what a warp's lanes read before one lane's arrival at an mbarrier, and would report each copy into a stage whose
# readers' warp gave it back so. In its build all lanes arrive (QUERN_RACECHECK, src/cuda/hopper/products.cuh), which is the
# same order in a form that it follows: what it reports there is no matter of __syncwarp().
set -u
cd "$(dirname "$0")/../.." || exit 1
tools=${QUERN_SANITIZE_TOOLS:-memcheck synccheck}
racing=no
[[ " $tools " == *' racecheck '* ]] && racing=yes
build=build/gpu
if [[ $racing == yes ]]; then
    [[ $tools == racecheck ]] || { echo "racecheck has a build of its own: name no other tool beside it"; exit 1; }
    build=build/gpu-racecheck
    export NVCC_APPEND_FLAGS="-lineinfo -DQUERN_RACECHECK ${NVCC_APPEND_FLAGS:-}" # reports name source lines
fi
end=${QUERN_SANITIZE_SECONDS:-530}
limit=${QUERN_SANITIZE_LIMIT:-300}
jobs=$(nproc) # asked before OMP_NUM_THREADS is set, which nproc obeys
tests/gpu/build.sh $build || exit 1
sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$(readlink -f "$(command -v nvcc)")")/compute-sanitizer")
"$sanitizer" --version | tail -n 1 || exit 1
logs=$build/sanitize
mkdir -p $logs
rm -f $logs/*
export OMP_NUM_THREADS=1 QUERN_GPU_RUNS=1 QUERN_TEST_TRIALS=${QUERN_TEST_TRIALS:-1/64}

# Programs, those first that take longest, so that none of them begins when the call's time is nearly over.
long=(variants dsv4_decode compress_cut attention_full dsv4_attention dsv4_index replay decode_step dsv4_hyper dsv4_layer_step
    dsv4_layer nsa_index_loss dsv4_cached large_scores nsa_short layer_steps nsa_gradient nsa_fused)
# For racecheck the kernels of each, by what their names hold. All of a program's clusters' kernels are among them: where a
# filter leaves one out, the tool itself fails. Where it follows the other pooling kernels, it reports reads of
# pool_short_gradients that are behind a __syncthreads().
declare -A raced=([dsv4_decode]=mqa [dsv4_attention]=attend_mqa [dsv4_cached]=mqa [nsa_index_loss]=loss [attention]=sm90
    [attention_full]=attend_backward [variants]=attend_backward [dsv4_hyper]=hyper [dsv4_index]=indexer [decode_step]=decode
    [nsa_lists]=sm90 [nsa_parts]=sm90 [nsa_property]=sm90 [nsa_nonfinite]=sm90 [nsa_msa]=block_index [nsa_decode]=decode
    [dsv4_index_loss]=loss [dsv4_compress]=pool_short_gradients [nvfp4_gemm]=grouped_gemm_sm90 [linear_rows]=e4m3_gemm
    [moe_route]=route [house]=sm90 [shared]=sm90 [replay]=sm90)
names=()
for program in "${long[@]/#/$build/tests/gpu_}" $build/tests/gpu_*_test; do
    program=${program%_test}_test
    name=${program##*/gpu_}
    base=${name%_test}
    [[ -x $program && " ${names[*]} " != *" $name "* ]] || continue
    [[ $base =~ ^(nsa_large|offsets|passes|v4)$ ]] && continue
    [[ $racing == no || -n ${raced[$base]:-} ]] || continue
    for pattern in ${QUERN_GPU_TESTS:-'*'}; do
        # shellcheck disable=SC2053
        [[ $name == $pattern ]] && names+=("$name") && break
    done
done

# run TOOL NAME: a program under a tool, to its log, whose last line says how it ended.
run() {
    local log=$logs/$1-$2 begin=$SECONDS left=$((end - 5 - SECONDS)) options=()
    # house_test asks for more memory than there is, on purpose: the runtime's refusal is no finding.
    [[ $1 == memcheck && $2 == house_test ]] && options=(--report-api-errors no)
    # few_rows_test compares with a kernel of cuBLASLt's, which does not end under synccheck: only Quern's own is followed.
    [[ $1 == synccheck && $2 == few_rows_test ]] && options=(--kernel-regex "kns=gemm_sm90_few")
    [[ $1 == racecheck ]] && options=(--kernel-regex "kns=${QUERN_RACE_KERNELS:-${raced[${2%_test}]}}")
    if ((left < 5)); then
        echo "not run" >"$log"
        return
    fi
    timeout -k 3 $((left < limit ? left : limit)) "$sanitizer" --tool "$1" "${options[@]}" --error-exitcode 9 --print-limit 20 \
        $build/tests/gpu_"$2" >"$log" 2>&1
    echo "exit code $? after $((SECONDS - begin)) s" >>"$log"
}
for name in "${names[@]}"; do
    for tool in $tools; do
        while (($(jobs -rp | wc -l) >= jobs)); do wait -n; done
        run "$tool" "$name" &
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

# findings LOG: its first reports and failed cases; false where it has none.
findings() {
    grep -E -A7 '^=+ (Error|Warning|Invalid|Barrier|Program|ERROR|RACECHECK)|^FAILED' "$1" | head -n 24 | cut -c1-240 | grep .
}
passed=0
failed=0
cut=()
skipped=()
for tool in $tools; do
    for name in "${names[@]}"; do
        log=$logs/$tool-$name
        last=$(tail -n 1 "$log")
        if [[ $last == 'not run' ]]; then
            skipped+=("$tool-$name")
        elif [[ $last == 'exit code '@(124|137)' '* ]] && ! findings "$log" >/dev/null; then
            cut+=("$tool-$name")
            echo "cut     $tool-$name (${last#exit code * })"
        elif [[ $last == 'exit code '[09]' '* ]] && clean "$log" && grep -Eq '^[1-9][0-9]* passed, 0 failed$' "$log"; then
            passed=$((passed + 1))
            echo "ok      $tool-$name ($(grep -E '^[0-9]+ passed' "$log" | tail -n 1); ${last#exit code ? })"
        else
            failed=$((failed + 1))
            echo "FAILED  $tool-$name ($last)"
            findings "$log"
        fi
    done
done
((${#skipped[@]} == 0)) || echo "not run ${skipped[*]}"
echo "$tools of ${#names[@]} programs, trials $QUERN_TEST_TRIALS: $passed ran whole without a finding, $failed failed," \
    "${#cut[@]} cut without a finding so far, ${#skipped[@]} not run"
failed=$((failed + ${#cut[@]} + ${#skipped[@]}))
echo "$SECONDS s"
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
