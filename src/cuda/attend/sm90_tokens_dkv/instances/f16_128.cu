/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "attend/sm90_tokens_dkv/kernel.cuh"

quern_status sm90_tokens_keys_f16_128(const attend_args *args, const attend_launch &l, cudaStream_t stream)
{
    return sm90_tokens_keys::run<f16, 128>(args, l, stream);
}
