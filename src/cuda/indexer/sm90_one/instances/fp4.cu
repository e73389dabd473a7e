/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fp4.cu - keys of FP4. */
#include "indexer/sm90_one/kernel.cuh"
#include "indexer/sm90_codes/fp4.cuh"

quern_status sm90_indexer::indexer_one_fp4(const stage_exec *exec, plan &p, const raw_scores &to)
{
    return run_one<fp4>(exec, p, to);
}
