/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* weights.cu - all tokens' weights: a thread a token. Limit: latency. */
#include "hyper/four/weights.cuh"

enum { THREADS = 64 };

__global__ void __launch_bounds__(THREADS) four_weigh(const __grid_constant__ four_params p)
{
    const int64_t token = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (token >= p.tokens) return;
    float sum[FORWARD_SUMS];
    token_weights w;
    add_panels(p, token, sum);
    weigh<false>(p, w, sum + SUM_FN, sum[SUM_SQUARE], NULL, 0);
    give_four(p.pre, token, 0, w.weight);
    give_four(p.post, token, 0, w.weight + COPIES);
#pragma unroll
    for (int i = 0; i < COPIES; i++) give_four(p.comb, token, i, w.weight + COMB + i * COPIES);
    if (p.pre_in.p != NULL) take_four(p.pre_in, token, 0, w.weight);
    float4 *const to = (float4 *)(p.weights + token * WEIGHTS);
#pragma unroll
    for (int j = 0; j < WEIGHTS; j += 4)
        to[j / 4] = make_float4(w.weight[j], w.weight[j + 1], w.weight[j + 2], w.weight[j + 3]);
}

quern_status four_weights(const four_params &p, cudaStream_t stream)
{
    four_weigh<<<blocks_for(p.tokens, THREADS), THREADS, 0, stream>>>(p);
    return LAUNCHED("hyper, weights");
}
