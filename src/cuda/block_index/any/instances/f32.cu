/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f32.cu - f32. */
#include "block_index/any/kernel.cuh"

quern_status any_block_index::block_index_f32(const launcher &to, const block_index_args *args,
                                              const block_index_kernel &a)
{
    return run<float>(to, args, a);
}
