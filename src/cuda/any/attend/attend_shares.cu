/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_shares.cu - how the rows of dK and dV are cut into shares where there are few keys, and the sum of
 * the shares' partial gradients, in order. Limit of the sum: its bytes over the copy rate. */
#include "any/attend/key_block.cuh"

/* Grid as that of the shares, with one block for all of them. */
template <typename T, bool LISTED>
__global__ void attend_backward_sum(const __grid_constant__ attend_kernel a, int64_t pieces, int keys)
{
    key_block b;
    if (LISTED ? !find_block(a, blockIdx.x, &b) : !find_range(a, blockIdx.x, pieces, keys, &b)) return;
    if (b.shares <= 1) return;
    const int width = a.dim_k + a.dim_v, pairs = width / 2;
    for (int i = threadIdx.x; i < (b.key_end - b.key0) * pairs; i += blockDim.x) {
        const int r = i / pairs, c = (i - r * pairs) * 2;
        const int64_t row = b.seq.k0 + b.key0 + r;
        float2 sum = make_float2(0.0f, 0.0f);
        for (int s = 0; s < b.shares; s++) {
            const float2 x = *(const float2 *)(a.part + ((b.slot + s) * keys + r) * width + c);
            sum.x += x.x;
            sum.y += x.y;
        }
        if (c < a.dim_k)
            store_pair<T>(a.d_k.p, b.seq.view_b * a.d_k.s[0] + row * a.d_k.s[1] + b.kvh * a.d_k.s[2] + c,
                          sum.x, sum.y, a.f32_dkv, a.add_k);
        else
            store_pair<T>(a.d_v.p,
                          b.seq.view_b * a.d_v.s[0] + row * a.d_v.s[1] + b.kvh * a.d_v.s[2] + c - a.dim_k,
                          sum.x, sum.y, a.f32_dkv, a.add_v);
    }
}

int64_t backward_pieces(const attend_args *args, int keys)
{
    if (present(args->list)) {
        const int64_t block = args->mask == ATTEND_COMPRESSED ? 128 : args->block_size;
        return args->k.shape[0] * args->k.shape[2] * (args->seqs.n_kv / block + args->seqs.batch + 1);
    }
    stage_seqs flipped = args->seqs;
    flipped.n_q = args->seqs.n_kv;
    return piece_bound(flipped, keys, 1);
}

int backward_keys(const attend_args *args)
{
    return args->q.shape[3] > 128 || args->v.shape[3] > 128 ? 64 : 128;
}

/* Enough to fill a large GPU four times, where there are rows enough. Compressed entries are few, and all
 * rows see the first ones: smaller shares shorten the wait for the last one. */
int backward_splits(const attend_args *args, int keys)
{
    if (present(args->list)) return 1;
    const int64_t blocks = backward_pieces(args, keys) * args->k.shape[2],
                  rows = args->seqs.n_q * (args->q.shape[2] / (args->k.shape[2] > 0 ? args->k.shape[2] : 1));
    const int64_t finer = args->mask == ATTEND_COMPRESSED ? 4 : 1, most = 16 * finer;
    int64_t splits = blocks > 0 ? 528 * finer / blocks : 1;
    if (splits > rows / 1024) splits = rows / 1024;
    return splits < 2 ? 1 : splits > most ? (int)most : (int)splits;
}

size_t backward_shares_bytes(const attend_args *args, int keys)
{
    const size_t row = (size_t)(args->q.shape[3] + args->v.shape[3]) * 4;
    if (present(args->list)) {
        const size_t block = args->mask == ATTEND_COMPRESSED ? 128 : (size_t)args->block_size;
        return (size_t)inverse_slots(args) * block * row + 15;
    }
    const int splits = backward_splits(args, keys);
    return splits > 1 ? (size_t)(backward_pieces(args, keys) * args->k.shape[2] * splits * keys) * row + 15
                      : 0;
}

template <typename T>
static void start_sum(const attend_kernel &a, bool listed, int64_t pieces, int keys, cudaStream_t stream)
{
    if (listed)
        attend_backward_sum<T, true><<<dim3((unsigned)pieces, 1), 256, 0, stream>>>(a, pieces, a.list_block);
    else
        attend_backward_sum<T, false>
            <<<dim3((unsigned)pieces, (unsigned)a.kv_heads), 256, 0, stream>>>(a, pieces, keys);
}

quern_status backward_sum_shares(const attend_args *args, const attend_launch &l, cudaStream_t stream)
{
    const int64_t pieces = backward_pieces(args, l.keys);
    if (pieces == 0 || l.kernel.kv_heads == 0) return QUERN_OK;
    if (l.listed ? inverse_slots(args) == 0 : l.kernel.splits <= 1) return QUERN_OK;
    if (l.dtype == QUERN_BF16) start_sum<bf16>(l.kernel, l.listed, pieces, l.keys, stream);
    else start_sum<f16>(l.kernel, l.listed, pieces, l.keys, stream);
    return LAUNCHED("attend_backward: sum of shares");
}
