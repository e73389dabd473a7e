/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * backward_sums.cu - of every token all sums over channels that its gradients need, by panels: products with
 * fn on the tensor cores, those of rows with rows on the f32 cores, 34 multiply-adds a channel, which take a
 * third of the time of the bytes. A block as in sums.cu; a warp has 8 tokens, a lane their sums in registers:
 * 46 of 128, and 40 of rows on their way. Limit: x, f, d_h and d_out read once.
 */
#include "hyper/four/panel.cuh"

enum { WARPS = 16, THREADS = WARPS * 32, TOKENS = 8, ROW_SUMS = BACKWARD_SUMS - WEIGHTS };

struct shared {
    fn_panel fn;
    float norm[PANEL];
};

/* A lane's chunks of a token. */
struct token_chunks {
    uint4 x[COPIES], d_out[COPIES], f, d_h;
};

template <bool H, bool OUT>
__device__ __forceinline__ void load_rows(const four_params &p, int64_t token, int channel, token_chunks &t)
{
    const bf16 *const x = (const bf16 *)p.x.p + token * p.x.token + channel, *const d =
                                                                                 (const bf16 *)p.d_out.p +
                                                                                 token * p.d_out.token +
                                                                                 channel;
#pragma unroll
    for (int i = 0; i < COPIES; i++) t.x[i] = load_once(x + i * p.x.copy);
#pragma unroll
    for (int i = 0; OUT && i < COPIES; i++) t.d_out[i] = load_once(d + i * p.d_out.copy);
    if (OUT) t.f = load_once((const bf16 *)p.f.p + token * p.f.token + channel);
    if (H) t.d_h = load_once((const bf16 *)p.d_h.p + token * p.d_h.token + channel);
}

/* The sums of one channel; h: d_h times the norm's weight. */
template <bool H, bool OUT>
__device__ __forceinline__ void add_channel(float (&sum)[ROW_SUMS], const float (&x)[COPIES],
                                            const float (&d_out)[COPIES], float f, float h)
{
    int pair = 0;
#pragma unroll
    for (int i = 0; i < COPIES; i++)
#pragma unroll
        for (int j = i; j < COPIES; j++, pair++) sum[pair] = fmaf(x[i], x[j], sum[pair]);
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        if (H) sum[SUM_H - WEIGHTS + i] = fmaf(x[i], h, sum[SUM_H - WEIGHTS + i]);
#pragma unroll
        for (int k = 0; OUT && k < COPIES; k++) {
            const int at = SUM_OUT - WEIGHTS + i * COPIES + k;
            sum[at] = fmaf(x[i], d_out[k], sum[at]);
        }
        if (OUT) sum[SUM_F - WEIGHTS + i] = fmaf(f, d_out[i], sum[SUM_F - WEIGHTS + i]);
    }
}

template <bool H, bool OUT>
__device__ __forceinline__ void add_rows(float (&sum)[ROW_SUMS], const token_chunks &t, const float *norm)
{
#pragma unroll
    for (int w = 0; w < 4; w++) {
        float2 x[COPIES], d_out[COPIES] = {}, f = {}, h = {};
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            x[i] = unpack2<bf16>(word_of(t.x[i], w));
            if (OUT) d_out[i] = unpack2<bf16>(word_of(t.d_out[i], w));
        }
        if (OUT) f = unpack2<bf16>(word_of(t.f, w));
        if (H) {
            const float2 weight = *(const float2 *)(norm + 2 * w);
            h = unpack2<bf16>(word_of(t.d_h, w));
            h.x *= weight.x, h.y *= weight.y;
        }
        const float x0[] = {x[0].x, x[1].x, x[2].x, x[3].x}, x1[] = {x[0].y, x[1].y, x[2].y, x[3].y},
                    d0[] = {d_out[0].x, d_out[1].x, d_out[2].x, d_out[3].x},
                    d1[] = {d_out[0].y, d_out[1].y, d_out[2].y, d_out[3].y};
        add_channel<H, OUT>(sum, x0, d0, f.x, h.x);
        add_channel<H, OUT>(sum, x1, d1, f.y, h.y);
    }
}

template <bool H, bool OUT>
__global__ void __launch_bounds__(THREADS, 1) four_sum_backward(const __grid_constant__ four_params p)
{
    extern __shared__ __align__(16) char memory[];
    shared &s = *(shared *)memory;
    const int panels = (p.width + PANEL - 1) / PANEL, panel = blockIdx.x % panels, lane = threadIdx.x % 32,
              steps = min(PANEL, p.width - panel * PANEL) / DEPTH;
    const int64_t tiles = p.padded / TOKENS, stride = (int64_t)(gridDim.x / panels) * WARPS;
    float *const columns = p.sums + (int64_t)panel * BACKWARD_SUMS * p.padded;
    for (int c = threadIdx.x; c < steps * DEPTH; c += THREADS) s.norm[c] = p.norm.at(panel * PANEL + c);
    load_panel(p, s.fn, panel);
    for (int64_t tile = (int64_t)(blockIdx.x / panels) * WARPS + threadIdx.x / 32; tile < tiles;
         tile += stride) {
        const int64_t token = min(tile * TOKENS + lane / 4, p.tokens - 1);
        float product[ROW_TILES][1][4] = {}, sum[ROW_SUMS] = {};
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const int channel = step * DEPTH + lane % 4 * CHUNK;
            token_chunks t;
            load_rows<H, OUT>(p, token, panel * PANEL + channel, t);
#pragma unroll
            for (int i = 0; i < COPIES; i++) {
                const uint4 x[] = {t.x[i]};
                multiply<1>(product, s.fn.pack[step * COPIES + i], x);
            }
            add_rows<H, OUT>(sum, t, s.norm + channel);
        }
        store_products<1>(p, columns, tile * TOKENS, product);
#pragma unroll
        for (int j = 0; j < ROW_SUMS; j++) {
            sum[j] += __shfl_xor_sync(~0u, sum[j], 1);
            sum[j] += __shfl_xor_sync(~0u, sum[j], 2);
            if (lane % 4 == j % 4) columns[(WEIGHTS + j) * p.padded + tile * TOKENS + lane / 4] = sum[j];
        }
    }
}

size_t four_sums_backward_bytes()
{
    return sizeof(shared);
}

quern_status four_sums_backward(const four_params &p, cudaStream_t stream)
{
    const int64_t panels = panels_of(p.width), most = (p.padded / TOKENS + WARPS - 1) / WARPS,
                  shares = most < shares_for(panels) ? most : shares_for(panels);
    const bool h = p.d_h.p != NULL, out = p.d_out.p != NULL;
    const auto kernel = h && out ? four_sum_backward<true, true>
                        : h      ? four_sum_backward<true, false>
                                 : four_sum_backward<false, true>;
    return launch_shared({stream, NULL}, kernel, dim3((unsigned)(panels * shares)), THREADS, sizeof(shared),
                         "hyper, sums for gradients", p);
}
