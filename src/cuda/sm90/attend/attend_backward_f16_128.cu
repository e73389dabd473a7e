/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "sm90/attend/attend_backward_keys.cuh"
#include "sm90/attend/attend_backward_rows.cuh"

quern_status sm90_rows_f16_128(const attend_args *args, const attend_launch &l, const sm90_device &device, void *workspace, cudaStream_t stream)
{
    return sm90_rows::run<f16, 128, 128>(args, l, device, workspace, stream);
}

quern_status sm90_keys_f16_128(const attend_args *args, const attend_launch &l, int64_t pieces, cudaStream_t stream)
{
    return sm90_keys::run<f16, 128, 128>(args, l, pieces, stream);
}
