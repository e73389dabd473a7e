/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* lists.cu - pairs of lists, in bf16. */
#include "indexer_loss/sm90/lists.cuh"

using namespace sm90_loss;

static const int64_t list_blocks = 132; /* of which a multiprocessor runs one */

template <int GROUPS> static quern_status launch_lists(const slice &s, cudaStream_t stream)
{
    const bool gradients = s.of.d_q_index.p != NULL || s.of.d_w.p != NULL || s.sums != NULL;
    return launch_behind(stream, indexer_loss_lists<GROUPS>,
                         dim3((unsigned)(s.count < list_blocks ? s.count : list_blocks)),
                         FEEDERS + GROUPS * 128, sizeof(lists_shared), "indexer_loss_lists", s, gradients,
                         s.d_q_wide);
}

quern_status sm90_loss::pairs_of_lists(const slice &s, cudaStream_t stream)
{
    if (!short_lists(s.of)) return launch<true, 1, 2>(stream, s);
    return s.tiles > LIST_TILES / 2 ? launch_lists<4>(s, stream) : launch_lists<2>(s, stream);
}
