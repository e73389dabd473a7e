/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - f16. */
#include "block_index/sm90/kernel.cuh"

quern_status sm90_block_index::block_index_f16(const stage_exec *exec, const block_index_args *args,
                                               const block_index_kernel &a)
{
    return run<f16>(exec, args, a);
}
