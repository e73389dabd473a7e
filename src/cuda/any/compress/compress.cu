/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * compress.cu - the compress stages: mean compression of K and V and its backward; products with weights are
 * compress_matrix.cu's.
 *
 * Forward: a thread owns eight columns of one head (of K or of V) and sums them over a quarter of the block's
 * l tokens, eight 16-byte loads in flight; 64 neighbours read 1 KB of each token's row contiguously, and the
 * four quarters meet in shared memory, in order. Overlapping blocks (d < l) meet in L2. A projection
 * multiplies the f32 mean, kept in workspace, by W. Backward: a thread writes d tokens' columns from the l/d
 * entries that cover them. Limit: forward reads K and V once (read rate), backward writes dK and dV once
 * (fill rate).
 */
#include "any/compress/compress.cuh"
#include "common/chunk.cuh"
#include "common/tail.cuh"
#include "stages.cuh"

enum { THREADS = 256, COLUMNS = 64, PARTS = THREADS / COLUMNS };

/* cu_seqlens of the compressed rows: cu_cmp [batch + 1]. One warp. */
__global__ void compress_cu_seqlens(seqs sq, int64_t l, int64_t d, int32_t *cu_cmp)
{
    int32_t total = 0;
    if (threadIdx.x == 0) cu_cmp[0] = 0;
    for (int64_t base = 0; base < sq.batch; base += 32) {
        const int64_t b = base + threadIdx.x;
        int32_t n = 0;
        if (b < sq.batch) {
            const int64_t len = cu_seqlens_at(sq.cu_q, b + 1, sq.n_q) - cu_seqlens_at(sq.cu_q, b, sq.n_q);
            n = (int32_t)mask_entries(len, l, d);
        }
        for (int w = 1; w < 32; w *= 2) {
            const int32_t left = __shfl_up_sync(~0u, n, w);
            if (threadIdx.x >= (unsigned)w) n += left;
        }
        if (b < sq.batch) cu_cmp[b + 1] = total + n;
        total += __shfl_sync(~0u, n, 31);
    }
}

/* VEC: all rows are aligned (asked at run time, it would keep loads from being issued together). ONCE: blocks
 * do not overlap, so each token is read once. */
template <typename T, bool VEC, bool ONCE>
__global__ void __launch_bounds__(THREADS) compress_mean(const __grid_constant__ compress_kernel a)
{
    __shared__ float4 shares[PARTS - 1][2][COLUMNS];
    const int chunks_k = a.side[0].dim / CHUNK * a.heads, column = threadIdx.x % COLUMNS,
              part = threadIdx.x / COLUMNS;
    const int groups = (chunks_k + a.side[1].dim / CHUNK * a.heads + COLUMNS - 1) / COLUMNS;
    const int64_t at =
        blockIdx.x / (unsigned)groups; /* neighbouring blocks read neighbouring columns of the same tokens */
    int c = (int)(blockIdx.x - at * groups) * COLUMNS + column;
    const int which = c >= chunks_k;
    if (which) c -= chunks_k;
    const compress_side &x = a.side[which];
    const int per_head = x.dim / CHUNK;
    const bool mine = c < per_head * a.heads;
    const int h = mine ? c / per_head : 0, col = mine ? (c - h * per_head) * CHUNK : 0;
    const int64_t vb = a.sq.cu_q != NULL ? 0 : at / a.rows, row = at - vb * a.rows;
    sequence seq;
    int64_t entry;
    const bool in = mine && entry_at(a, vb, row, &seq, &entry);
    float sum[CHUNK] = {};
    if (in) {
        const int from = (int)(part * a.l / PARTS), to = (int)((part + 1) * a.l / PARTS);
        const T *p = (const T *)x.x.p + seq.view_b * x.x.s[0] + (seq.q0 + entry * a.d + from) * x.x.s[1] +
                     h * x.x.s[2] + col;
#pragma unroll 8
        for (int t = from; t < to; t++, p += x.x.s[1]) {
            const chunk v = load_chunk<T, ONCE>(p, VEC);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) sum[i] += v.x[i];
        }
    }
    if (part > 0) {
        shares[part - 1][0][column] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        shares[part - 1][1][column] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    __syncthreads();
    if (part > 0 || !mine) return;
#pragma unroll
    for (int s = 0; s < PARTS - 1; s++) {
        const float4 lo = shares[s][0][column], hi = shares[s][1][column];
        sum[0] += lo.x;
        sum[1] += lo.y;
        sum[2] += lo.z;
        sum[3] += lo.w;
        sum[4] += hi.x;
        sum[5] += hi.y;
        sum[6] += hi.z;
        sum[7] += hi.w;
    }
    chunk mean;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) mean.x[i] = sum[i] / (float)a.l;
    if (x.mean != NULL) store_chunk(x.mean + ((vb * a.rows + row) * a.heads + h) * x.dim + col, mean, true);
    else
        store_chunk((T *)x.cmp.p + vb * x.cmp.s[0] + row * x.cmp.s[1] + h * x.cmp.s[2] + col, mean,
                    x.vec_out);
}

/* Tokens [j d, (j + 1) d) of a sequence lie in the entries j - l/d + 1 ... j. */
template <typename T>
__global__ void __launch_bounds__(THREADS) compress_spread(const __grid_constant__ compress_kernel a)
{
    const int chunks_k = a.side[0].d_x.p != NULL ? a.side[0].dim / CHUNK * a.heads : 0;
    int c = blockIdx.y * blockDim.x + threadIdx.x;
    const int which = c >= chunks_k;
    if (which) c -= chunks_k;
    const compress_side &x = a.side[which];
    const int per_head = x.dim / CHUNK;
    if (x.d_x.p == NULL || c >= per_head * a.heads) return;
    const int h = c / per_head, col = c % per_head * CHUNK;
    sequence seq;
    int64_t t0;
    if (!piece_at(a.sq, blockIdx.x, a.d, 1, &seq, &t0)) return;
    const bool reads = x.d_mean != NULL || x.d_cmp.p != NULL;
    const int64_t entries = reads ? mask_entries(seq.nq, a.l, a.d) : 0, j = t0 / a.d;
    const int64_t row0 = a.sq.cu_q == NULL || entries == 0 ? 0 : a.sq.cu_kv[seq.b];
    chunk sum = {};
    for (int64_t e = j - a.l / a.d + 1 < 0 ? 0 : j - a.l / a.d + 1; e <= j && e < entries; e++) {
        chunk v;
        if (x.d_mean != NULL)
            v = load_chunk(x.d_mean + ((seq.view_b * a.rows + row0 + e) * a.heads + h) * x.dim + col, true);
        else {
            const int64_t at = seq.view_b * x.d_cmp.s[0] + (row0 + e) * x.d_cmp.s[1] + h * x.d_cmp.s[2] + col;
            v = x.d_cmp_f32 ? load_chunk((const float *)x.d_cmp.p + at, x.vec_d)
                            : load_chunk((const T *)x.d_cmp.p + at, x.vec_d);
        }
#pragma unroll
        for (int i = 0; i < CHUNK; i++) sum.x[i] += v.x[i];
    }
#pragma unroll
    for (int i = 0; i < CHUNK; i++) sum.x[i] /= (float)a.l;
    const int64_t end = t0 + a.d < seq.nq ? t0 + a.d : seq.nq;
    const int64_t at = seq.view_b * x.d_x.s[0] + (seq.q0 + t0) * x.d_x.s[1] + h * x.d_x.s[2] + col;
    for (int64_t t = t0; t < end; t++) {
        const int64_t p = at + (t - t0) * x.d_x.s[1];
        if (!x.d_x_f32) {
            store_chunk((T *)x.d_x.p + p, sum, x.vec_out);
        } else if (!a.add) {
            store_chunk((float *)x.d_x.p + p, sum, x.vec_out);
        } else {
            chunk v = load_chunk((float *)x.d_x.p + p, false);
#pragma unroll
            for (int i = 0; i < CHUNK; i++) v.x[i] += sum.x[i];
            store_chunk((float *)x.d_x.p + p, v, x.vec_out);
        }
    }
}

/* d_w, d_pe = 0: no gradient comes through the compression. */
__global__ void compress_clear(float *p, int64_t rows, int64_t dim, int64_t s0, int64_t s1)
{
    const int64_t h = blockIdx.y;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * dim;
         i += (int64_t)gridDim.x * blockDim.x)
        p[h * s0 + i / dim * s1 + i % dim] = 0.0f;
}

/* The tensors of one side. */
struct side_args {
    const quern_tensor *x, *w, *pe, *cmp, *d_cmp, *d_x, *d_w, *d_pe;
};

static side_args side_of(const compress_args *a, int side)
{
    if (side == 0) return {&a->k, &a->w_k, &a->pe_k, &a->k_cmp, &a->d_k_cmp, &a->d_k, &a->d_w_k, &a->d_pe_k};
    return {&a->v, &a->w_v, &a->pe_v, &a->v_cmp, &a->d_v_cmp, &a->d_v, &a->d_w_v, &a->d_pe_v};
}

/* Rows of the compressed tensors in one batch view. */
static int64_t cmp_rows(const compress_args *args)
{
    const quern_tensor *const any[] = {&args->k_cmp, &args->v_cmp, &args->d_k_cmp, &args->d_v_cmp};
    for (int i = 0; i < 4; i++)
        if (present(*any[i])) return any[i]->shape[1];
    return 0;
}

static bool linear(const compress_args *args)
{
    return args->kind == COMPRESS_LINEAR;
}

/* Whether a gradient of this side comes through the compression at all. */
static bool reaches(const compress_args *args, int side)
{
    return args->kind != COMPRESS_GIVEN && present(*side_of(args, side).d_cmp);
}

static compress_kernel kernel_of(const compress_args *args)
{
    compress_kernel a = {};
    a.sq = seqs_of(args->seqs);
    a.heads = (int)args->k.shape[2];
    a.l = args->block_size;
    a.d = args->stride;
    a.rows = cmp_rows(args);
    a.add = args->accumulate;
    for (int i = 0; i < 2; i++) {
        const side_args t = side_of(args, i);
        compress_side &s = a.side[i];
        s.x = view4_of(*t.x);
        s.cmp = view4_of(*t.cmp);
        s.d_x = view4_of(*t.d_x);
        if (reaches(args, i)) s.d_cmp = view4_of(*t.d_cmp);
        s.dim = (int)t.x->shape[3];
        s.vec = rows_aligned16(*t.x);
        s.vec_out = rows_aligned16(present(*t.d_x) ? *t.d_x : *t.cmp);
        s.vec_d = rows_aligned16(*t.d_cmp);
        s.d_cmp_f32 = t.d_cmp->dtype == QUERN_F32;
        s.d_x_f32 = t.d_x->dtype == QUERN_F32;
    }
    return a;
}

/* Puts a side's workspace in place: the mean and its gradient with a projection, then the matrix products'
 * scratch, which the sides use in turn. */
static size_t carve(const compress_args *args, bool backward, void *workspace, compress_kernel *a,
                    float **scratch)
{
    float *p = (float *)(((uintptr_t)workspace + 15) & ~(uintptr_t)15);
    size_t used = 0, most = 0;
    for (int i = 0; i < 2; i++) {
        const side_args t = side_of(args, i);
        if (!present(*t.w) || (backward && !reaches(args, i))) continue;
        const size_t n =
            linear(args) ? 0 : (size_t)(t.x->shape[0] * cmp_rows(args) * t.x->shape[2] * t.x->shape[3]);
        if (a != NULL && n > 0) {
            a->side[i].mean = p + used;
            a->side[i].d_mean = backward ? p + used + n : NULL;
        }
        used += backward ? 2 * n : n;
        const size_t bytes = compress_matrix_bytes(args, i, backward);
        if (bytes > most) most = bytes;
    }
    if (scratch != NULL) *scratch = p + used;
    used += (most + 3) / 4;
    return used > 0 ? used * 4 + 15 : 0;
}

bool compress_supports(const stage_exec *, const compress_args *args, char why[STAGE_WHY_BYTES])
{
    return dims_fit(args->k.shape[3], args->v.shape[3], why);
}
size_t compress_forward_bytes(const stage_exec *, const compress_args *args)
{
    return carve(args, false, NULL, NULL, NULL);
}
size_t compress_backward_bytes(const stage_exec *, const compress_args *args)
{
    return carve(args, true, NULL, NULL, NULL);
}

/* The means of the sides that want them, into cmp or the workspace. */
template <typename T>
static quern_status means(const compress_args *args, compress_kernel a, bool side0, bool side1,
                          cudaStream_t stream)
{
    const int64_t views = args->k.shape[0];
    if (!side0) a.side[0].dim = 0;
    if (!side1) a.side[1].dim = 0;
    const int chunks = (a.side[0].dim + a.side[1].dim) / CHUNK * a.heads;
    if (views * a.rows == 0 || chunks == 0) return QUERN_OK;
    const unsigned grid = (unsigned)(views * a.rows * ((chunks + COLUMNS - 1) / COLUMNS));
    if (!(a.side[0].vec && a.side[1].vec)) compress_mean<T, false, false><<<grid, THREADS, 0, stream>>>(a);
    else if (a.d < a.l) compress_mean<T, true, false><<<grid, THREADS, 0, stream>>>(a);
    else compress_mean<T, true, true><<<grid, THREADS, 0, stream>>>(a);
    return LAUNCHED("compress mean");
}

template <typename T>
static quern_status forward(const compress_args *args, void *workspace, cudaStream_t stream)
{
    compress_kernel a = kernel_of(args);
    float *scratch = NULL;
    carve(args, false, workspace, &a, &scratch);
    if (args->seqs.cu_q.data != NULL)
        compress_cu_seqlens<<<1, 32, 0, stream>>>(a.sq, a.l, a.d, (int32_t *)args->seqs.cu_kv.data);
    quern_status status =
        linear(args) ? LAUNCHED("compress cu_seqlens") : means<T>(args, a, true, true, stream);
    for (int i = 0; i < 2 && status == QUERN_OK; i++)
        if (present(*side_of(args, i).w)) status = compress_matrix_forward(args, a, i, scratch, stream);
    return status;
}

template <typename T>
static quern_status backward(const compress_args *args, void *workspace, cudaStream_t stream)
{
    compress_kernel a = kernel_of(args);
    float *scratch = NULL;
    carve(args, true, workspace, &a, &scratch);
    const bool mean0 = a.side[0].mean != NULL && present(args->d_w_k),
               mean1 = a.side[1].mean != NULL && present(args->d_w_v);
    quern_status status = means<T>(args, a, mean0, mean1, stream);
    for (int i = 0; i < 2 && status == QUERN_OK; i++) {
        const side_args t = side_of(args, i);
        if (reaches(args, i)) {
            if (present(*t.w)) status = compress_matrix_backward(args, a, i, scratch, stream);
            continue;
        }
        const quern_tensor *const clear[] = {t.d_w, t.d_pe};
        for (int j = 0; j < 2; j++)
            if (present(*clear[j]) && clear[j]->shape[0] > 0)
                compress_clear<<<dim3(64, (unsigned)clear[j]->shape[0]), 256, 0, stream>>>(
                    (float *)clear[j]->data, clear[j]->shape[1], clear[j]->shape[2], clear[j]->strides[0],
                    clear[j]->strides[1]);
        status = LAUNCHED("compress clear");
    }
    for (int i = 0; i < 2; i++)
        if (linear(args) && reaches(args, i)) a.side[i].d_x.p = NULL; /* written above */
    const int chunks =
        ((a.side[0].d_x.p != NULL ? a.side[0].dim : 0) + (a.side[1].d_x.p != NULL ? a.side[1].dim : 0)) /
        CHUNK * a.heads;
    const int64_t pieces = piece_bound(args->seqs, a.d, 1);
    if (status != QUERN_OK || chunks == 0 || pieces == 0) return status;
    const int threads = chunks < THREADS ? (chunks + 31) / 32 * 32 : THREADS;
    compress_spread<T>
        <<<dim3((unsigned)pieces, (unsigned)((chunks + threads - 1) / threads)), threads, 0, stream>>>(a);
    return LAUNCHED("compress spread");
}

quern_status compress_forward_run(const stage_exec *exec, const compress_args *args, void *workspace)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    if (args->k.dtype == QUERN_F32) return forward<float>(args, workspace, stream);
    return args->k.dtype == QUERN_BF16 ? forward<bf16>(args, workspace, stream)
                                       : forward<f16>(args, workspace, stream);
}

quern_status compress_backward_run(const stage_exec *exec, const compress_args *args, void *workspace)
{
    cudaStream_t stream = (cudaStream_t)exec->stream;
    quern_status status = args->k.dtype == QUERN_F32    ? backward<float>(args, workspace, stream)
                          : args->k.dtype == QUERN_BF16 ? backward<bf16>(args, workspace, stream)
                                                        : backward<f16>(args, workspace, stream);
    if (args->accumulate) return status;
    if (status == QUERN_OK) status = fill_tail(exec, &args->seqs, true, &args->d_k, 0.0f);
    return status != QUERN_OK ? status : fill_tail(exec, &args->seqs, true, &args->d_v, 0.0f);
}
