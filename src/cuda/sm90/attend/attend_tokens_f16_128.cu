/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "sm90/attend/apart.cuh"
#include "sm90/attend/attend_tokens.cuh"

quern_status sm90_tokens_f16_128(const attend_args *args, const attend_launch &l, const sm90_device &device,
                                 void *workspace, cudaStream_t stream)
{
    return sm90_tokens::run<f16, 128, 128>(args, l, device, workspace, stream);
}

quern_status sm90_tokens_but_f16_128(const attend_args *args, const attend_launch &l,
                                     const int32_t *elsewhere, const sm90_device &device, void *workspace,
                                     cudaStream_t stream)
{
    return sm90_tokens::run<f16, 128, 128>(args, l, device, workspace, stream, elsewhere);
}
