/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lists.cu - pairs of lists, in bf16. */
#include "indexer_loss/sm90/kernel.cuh"

quern_status sm90_loss::pairs_of_lists(const slice &s, cudaStream_t stream)
{
    return launch<true, 1, 2>(stream, s);
}
