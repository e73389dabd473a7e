/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend_gate/sm90/kernel.cuh"

quern_status sm90_gated_bf16_128(const attend_gate_args *args, const sm90_gated &a, const sm90_device &device,
                                 void *workspace, cudaStream_t stream)
{
    return sm90_gate::launch_gated<bf16, 128>(args, a, device, workspace, stream);
}
