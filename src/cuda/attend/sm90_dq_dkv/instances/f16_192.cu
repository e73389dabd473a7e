/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/sm90_dq_dkv/dkv.cuh"
#include "attend/sm90_dq_dkv/dq.cuh"

quern_status sm90_rows_f16_192(const attend_args *args, const attend_launch &l, const sm90_device &device,
                               void *workspace, cudaStream_t stream)
{
    return sm90_rows::run<f16, 192, 128>(args, l, device, workspace, stream);
}

quern_status sm90_keys_f16_192(const attend_args *args, const attend_launch &l,
                               const sm90_backward_plan &plan, cudaStream_t stream)
{
    return sm90_backward::run_keys<f16, 192, 128>(args, l, plan, stream);
}
