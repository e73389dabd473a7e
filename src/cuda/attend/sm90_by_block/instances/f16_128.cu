/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/sm90_by_block/kernel.cuh"

quern_status sm90_by_block_f16_128(const attend_args *args, const attend_kernel &a, const token_slice &s,
                                   cudaStream_t stream)
{
    return sm90_by_block::run<f16, 128>(args, a, s, stream);
}
