/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dense.cu - pairs of all entries that are seen, in bf16, and the gradient of these. */
#include "indexer_loss/sm90/kernel.cuh"
#include "indexer_loss/sm90/keys.cuh"

quern_status sm90_loss::pairs_of_all(const slice &s, cudaStream_t stream)
{
    return s.of.dim <= WIDTH ? launch<false, 2, 3>(stream, s) : launch<false, 1, 2>(stream, s);
}

quern_status sm90_loss::keys_of_all(const slice &s, cudaStream_t stream)
{
    const unsigned tiles = (unsigned)((s.of.entries + TILE - 1) / TILE);
    const dim3 grid(tiles, (unsigned)(s.of.shares / KEYS_PAIRS));
    return launch_shared({stream, NULL}, indexer_loss_keys, grid, KEYS_THREADS, sizeof(keys_shared),
                         "indexer_loss_keys", s);
}
