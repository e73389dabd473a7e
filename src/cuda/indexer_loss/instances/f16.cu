/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "indexer_loss/kernel.cuh"

template <> size_t loss_bytes<__half>(const loss_params &p)
{
    return bytes_here<__half>(p);
}

template <> quern_status loss_run<__half>(const loss_params &p, cudaStream_t stream)
{
    return run_here<__half>(p, stream);
}
