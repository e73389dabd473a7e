/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - bf16. */
#include "block_index/any/kernel.cuh"

quern_status any_block_index::block_index_bf16(const launcher &to, const block_index_args *args,
                                               const block_index_kernel &a)
{
    return run<bf16>(to, args, a);
}
