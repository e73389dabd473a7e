/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/sm90_tokens_dq/kernel.cuh"

quern_status sm90_tokens_rows_bf16_128(const attend_args *args, const attend_launch &l,
                                       const sm90_device &device, void *workspace, cudaStream_t stream)
{
    return sm90_tokens::run_rows<bf16, 128, 128>(args, l, device, workspace, stream);
}
