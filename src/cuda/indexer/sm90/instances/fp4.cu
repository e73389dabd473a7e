/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fp4.cu - keys of FP4. */
#include "indexer/sm90/kernel.cuh"
#include "indexer/sm90_codes/fp4.cuh"

quern_status sm90_indexer::indexer_fp4(const stage_exec *exec, plan &p, const share_lists &lists)
{
    return run<fp4>(exec, p, lists);
}
