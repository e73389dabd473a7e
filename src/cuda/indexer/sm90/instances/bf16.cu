/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - keys of bf16. */
#include "indexer/sm90/kernel.cuh"

quern_status sm90_indexer::indexer_bf16(const stage_exec *exec, plan &p, const share_lists &lists)
{
    return run<rows<bf16>>(exec, p, lists);
}
