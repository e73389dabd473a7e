/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* f32.cu - f32. */
#include "index_decode/kernel.cuh"

quern_status index_decode::index_f32(const stage_exec *, const index_kernel &a, const launcher &to)
{
    return launch<plain_scores>(index_plain<float>, a, to);
}
