/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* codes.cu - keys of FP8 and queries that are rounded to it, multiplied as they are. */
#include "indexer/sm90/kernel.cuh"
#include "indexer/sm90_codes/codes.cuh"

quern_status sm90_indexer::indexer_codes(const stage_exec *exec, plan &p, const share_lists &lists)
{
    return run<codes>(exec, p, lists);
}
