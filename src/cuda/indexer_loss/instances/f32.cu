/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "indexer_loss/kernel.cuh"

template <> size_t loss_bytes<float>(const loss_params &p)
{
    return bytes_here<float>(p);
}

template <> quern_status loss_run<float>(const loss_params &p, cudaStream_t stream)
{
    return run_here<float>(p, stream);
}
