/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/sm90_forward/kernel.cuh"

quern_status sm90_forward_bf16_256(const attend_args *args, const attend_launch &l, const sm90_device &device,
                                   void *workspace, cudaStream_t stream)
{
    return sm90_forward::run<bf16, 256, 256>(args, l, device, workspace, stream);
}
