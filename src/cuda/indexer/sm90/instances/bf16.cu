/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - keys of bf16. */
#include "indexer/sm90/kernel.cuh"

quern_status sm90_indexer::indexer_bf16(const stage_exec *exec, const index_kernel &a, const key_feed &f,
                                        const CUtensorMap &map, bool one)
{
    return run<bf16, ROWS>(exec, a, f, map, one);
}
