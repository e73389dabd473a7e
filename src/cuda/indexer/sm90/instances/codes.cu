/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* codes.cu - keys of FP8 and queries that are rounded to it, multiplied as they are. */
#include "indexer/sm90/kernel.cuh"

quern_status sm90_indexer::indexer_codes(const stage_exec *exec, const index_kernel &a, const key_feed &f,
                                         const CUtensorMap &map, bool one)
{
    return run<bf16, CODES>(exec, a, f, map, one);
}
