/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "indexer_loss/kernel.cuh"

template <> size_t loss_bytes<bf16>(const loss_params &p)
{
    return bytes_here<bf16>(p);
}

template <> quern_status loss_run<bf16>(const loss_params &p, cudaStream_t stream)
{
    return run_here<bf16>(p, stream);
}
