/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* codes.cu - keys of FP8 and queries that are rounded to it, multiplied as they are. */
#include "indexer/sm90_one/kernel.cuh"
#include "indexer/sm90_codes/codes.cuh"

quern_status sm90_indexer::indexer_one_codes(const stage_exec *exec, plan &p, const raw_scores &to)
{
    return run_one<codes>(exec, p, to);
}
