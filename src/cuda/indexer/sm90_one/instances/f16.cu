/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - keys of f16. */
#include "indexer/sm90_one/kernel.cuh"

quern_status sm90_indexer::indexer_one_f16(const stage_exec *exec, plan &p, const raw_scores &to)
{
    return run_one<rows<f16>>(exec, p, to);
}
