/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - bf16. */
#include "block_index/sm90/kernel.cuh"

quern_status sm90_block_index::block_index_bf16(const stage_exec *exec, const block_index_args *args,
                                                const block_index_kernel &a)
{
    return run<bf16>(exec, args, a);
}
