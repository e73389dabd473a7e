/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/sm90_by_block/params.cuh"
#include "attend/sm90_tokens/kernel.cuh"

quern_status sm90_tokens_bf16_128(const attend_args *args, const attend_launch &l, const sm90_device &device,
                                  void *workspace, cudaStream_t stream)
{
    return sm90_tokens::run<bf16, 128, 128>(args, l, device, workspace, stream);
}

quern_status sm90_tokens_but_bf16_128(const attend_args *args, const attend_launch &l,
                                      const int32_t *elsewhere, const sm90_device &device, void *workspace,
                                      cudaStream_t stream)
{
    return sm90_tokens::run<bf16, 128, 128>(args, l, device, workspace, stream, elsewhere);
}
