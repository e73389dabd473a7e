/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - bf16, any head dims. */
#include "decode/plain/kernel.cuh"

quern_status decode_dense::dense_plain_bf16(const stage_exec *, const dense_kernel &a, const launcher &to)
{
    return launch_plain<bf16>(a, to);
}
