/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fp4.cu - keys of FP4. */
#include "indexer/sm90/kernel.cuh"

quern_status sm90_indexer::indexer_fp4(const stage_exec *exec, const index_kernel &a, const key_feed &f,
                                       const CUtensorMap &map, bool one)
{
    return run<bf16, FP4>(exec, a, f, map, one);
}
