/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* bf16.cu - appends of a token a sequence: projections in f32 to rows, in bf16 to V4's bytes. */
#include "pool/append/one.cuh"

template <>
quern_status launch_one<float, bf16, ENTRY_ROWS, ENTRY_ROWS>(const append_kernel &a, cudaStream_t stream)
{
    return launch_one_kernel<float, bf16, ENTRY_ROWS, ENTRY_ROWS>(a, stream);
}

template <>
quern_status launch_one<bf16, bf16, ENTRY_ROW584, ENTRY_FP8>(const append_kernel &a, cudaStream_t stream)
{
    return launch_one_kernel<bf16, bf16, ENTRY_ROW584, ENTRY_FP8>(a, stream);
}
