/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/sm90_by_block/params.cuh"
#include "attend/sm90_tokens/kernel.cuh"

quern_status sm90_tokens_f16_64(const attend_args *args, const attend_launch &l, const sm90_device &device,
                                void *workspace, cudaStream_t stream)
{
    return sm90_tokens::run<f16, 64, 64>(args, l, device, workspace, stream);
}

quern_status sm90_tokens_but_f16_64(const attend_args *args, const attend_launch &l, const int32_t *elsewhere,
                                    const sm90_device &device, void *workspace, cudaStream_t stream)
{
    return sm90_tokens::run<f16, 64, 64>(args, l, device, workspace, stream, elsewhere);
}
