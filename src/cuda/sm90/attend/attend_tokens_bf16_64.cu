/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "sm90/attend/apart.cuh"
#include "sm90/attend/attend_tokens.cuh"

quern_status sm90_tokens_bf16_64(const attend_args *args, const attend_launch &l, const sm90_device &device,
                                 void *workspace, cudaStream_t stream)
{
    return sm90_tokens::run<bf16, 64, 64>(args, l, device, workspace, stream);
}

quern_status sm90_tokens_but_bf16_64(const attend_args *args, const attend_launch &l,
                                     const int32_t *elsewhere, const sm90_device &device, void *workspace,
                                     cudaStream_t stream)
{
    return sm90_tokens::run<bf16, 64, 64>(args, l, device, workspace, stream, elsewhere);
}
