/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - bf16. */
#include "indexer/any/kernel.cuh"

quern_status any_indexer::indexer_bf16(const stage_exec *exec, const indexer_args *args,
                                       const index_kernel &a)
{
    return launch<bf16>(exec, args, a);
}
