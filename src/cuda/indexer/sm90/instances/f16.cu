/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - keys of f16. */
#include "indexer/sm90/kernel.cuh"

quern_status sm90_indexer::indexer_f16(const stage_exec *exec, plan &p, const share_lists &lists)
{
    return run<rows<f16>>(exec, p, lists);
}
