#!/bin/bash
# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
# Builds the library, the command and the GPU's tests in build/gpu, runs them, compares the registers and the machine
# code of the kernels for sm_90a with their tables, and ends with `N passed, N failed`: one call of under nine minutes on
# a machine with a GPU and nvcc. Programs that compare whole layers run again with the kernel of three branches and gate
# wherever it can, those of NVFP4's product with the kernel for any GPU.
#   QUERN_GPU_TESTS  patterns of the programs to run (all)
set -u
cd "$(dirname "$0")/../.." || exit 1
jobs=$(nproc)
passed=0
failed=0
logs=build/gpu/logs
tests/gpu/build.sh || exit 1
mkdir -p $logs
export OMP_NUM_THREADS=4 OMP_WAIT_POLICY=passive
programs=()
for program in build/gpu/tests/gpu_*_test; do
    for pattern in ${QUERN_GPU_TESTS:-'*'}; do
        # shellcheck disable=SC2053
        [[ ${program##*/gpu_} == $pattern ]] || continue
        programs+=("$program")
        [[ ${program##*/gpu_} =~ ^nsa_(property|fused|nonfinite|causality|determinism)_test$ ]] &&
            programs+=("$program@attend_gate_sm90")
        [[ ${program##*/gpu_} =~ ^nvfp4_(gemm|fused_gemm)_test$ ]] &&
            programs+=("$program@grouped_gemm_any" "$program@grouped_gemm_backward_any")
    done
done
for program in "${programs[@]}"; do
    while (($(jobs -rp | wc -l) >= (jobs > 8 ? 6 : 2))); do wait -n; done
    (variant=${program#"${program%@*}"}
     export QUERN_GPU_VARIANT=${variant#@}
     # Sequences in many pieces: each stage of each takes the pools to the device and back.
     [[ ${program##*/gpu_} =~ ^(cache|cache_copy|nsa_decode|dsv4_layer|dsv4_layer_step)_test(@.*)?$ ]] && export QUERN_TEST_TRIALS=1/8
     timeout 240 "${program%@*}" >"$logs/${program##*/}" 2>&1
     echo "exit code $?" >>"$logs/${program##*/}") &
done
wait
for program in "${programs[@]}"; do
    log=$logs/${program##*/}
    read -r good bad < <(sed -n 's/^\([0-9]*\) passed, \([0-9]*\) failed$/\1 \2/p' "$log" | tail -n 1) || { good=0 bad=0; }
    grep -q '^exit code 0$' "$log" || [[ $bad != 0 ]] || bad=1
    passed=$((passed + good))
    failed=$((failed + bad))
    if [[ $bad == 0 ]]; then
        echo "ok      ${program##*/}: $good cases"
    else
        echo "FAILED  ${program##*/}"
        tail -n 12 "$log" | cut -c1-300
    fi
done
if [[ ${CUDAARCHS:-90a-real} != *90a* ]]; then
    echo "no code for sm_90a: registers and machine code are not compared"
else
    for check in registers sass; do
        if tests/$check.sh build/gpu >"$logs/$check" 2>&1; then
            passed=$((passed + 1))
            echo "ok      $check of the kernels"
        else
            failed=$((failed + 1))
            echo "FAILED  $check of the kernels"
            head -n 40 "$logs/$check"
        fi
    done
fi
echo "$SECONDS s"
echo "$passed passed, $failed failed"
[[ $failed == 0 && $passed != 0 ]]
