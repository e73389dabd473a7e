/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fp8.cu - keys of FP8. */
#include "indexer/sm90/kernel.cuh"

quern_status sm90_indexer::indexer_fp8(const stage_exec *exec, const index_kernel &a, const key_feed &f,
                                       const CUtensorMap &map, bool one)
{
    return run<bf16, FP8>(exec, a, f, map, one);
}
