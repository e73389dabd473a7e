/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f16.cu - f16. */
#include "block_index/any/kernel.cuh"

quern_status any_block_index::block_index_f16(const launcher &to, const block_index_args *args,
                                              const block_index_kernel &a)
{
    return run<f16>(to, args, a);
}
