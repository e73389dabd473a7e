/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fp8.cu - keys of FP8. */
#include "indexer/sm90_one/kernel.cuh"
#include "indexer/sm90_codes/fp8.cuh"

quern_status sm90_indexer::indexer_one_fp8(const stage_exec *exec, plan &p, const raw_scores &to)
{
    return run_one<fp8>(exec, p, to);
}
