/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* launch.cu - the compress stages: means by compress/mean/kernel.cuh, products with weights by
 * compress/matrix/launch.cu, and what of the workspace each gets. */
#include "compress/matrix/params.cuh"
#include "common/chunk.cuh"
#include "common/gemm.cuh"
#include "common/tail.cuh"
#include "variants.cuh"

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
static size_t carve(const compress_args *args, bool backward, bool cublaslt, void *workspace,
                    compress_kernel *a, float **scratch)
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
        const size_t bytes = compress_matrix_bytes(args, i, backward, cublaslt);
        if (bytes > most) most = bytes;
    }
    if (scratch != NULL) *scratch = p + used;
    used += (most + 3) / 4;
    return used > 0 ? used * 4 + 15 : 0;
}

static bool compress_supports(const stage_exec *, const compress_args *args, char why[STAGE_WHY_BYTES])
{
    return dims_fit(args->k.shape[3], args->v.shape[3], why);
}

/* Weights on inputs of 16 bits, and rows to multiply. */
static bool compress_cublaslt_supports(const stage_exec *, const compress_args *args,
                                       char why[STAGE_WHY_BYTES])
{
    return (present(args->w_k) || present(args->w_v)) && args->k.dtype != QUERN_F32 &&
           args->k.shape[0] * cmp_rows(args) > 0 && gemm_available() &&
           dims_fit(args->k.shape[3], args->v.shape[3], why);
}

static size_t compress_forward_bytes(const stage_exec *, const compress_args *args)
{
    return carve(args, false, false, NULL, NULL, NULL);
}

static size_t compress_backward_bytes(const stage_exec *, const compress_args *args)
{
    return carve(args, true, false, NULL, NULL, NULL);
}

static size_t compress_forward_cublaslt_bytes(const stage_exec *exec, const compress_args *args)
{
    char why[STAGE_WHY_BYTES];
    return compress_cublaslt_supports(exec, args, why) ? carve(args, false, true, NULL, NULL, NULL) : 0;
}

static size_t compress_backward_cublaslt_bytes(const stage_exec *exec, const compress_args *args)
{
    char why[STAGE_WHY_BYTES];
    return compress_cublaslt_supports(exec, args, why) ? carve(args, true, true, NULL, NULL, NULL) : 0;
}

/* The means of the sides that want them, into cmp or the workspace. */
static quern_status means(const compress_args *args, compress_kernel a, bool side0, bool side1,
                          cudaStream_t stream)
{
    const int64_t rows = args->k.shape[0] * a.rows;
    if (!side0) a.side[0].dim = 0;
    if (!side1) a.side[1].dim = 0;
    const int chunks = (a.side[0].dim + a.side[1].dim) / CHUNK * a.heads;
    if (rows == 0 || chunks == 0) return QUERN_OK;
    return compress_parts_of(args->k.dtype).means(a, rows, chunks, stream);
}

/* `cublaslt`: products with weights on tensor cores. */
static quern_status forward(const compress_args *args, bool cublaslt, void *workspace, cudaStream_t stream)
{
    compress_kernel a = kernel_of(args);
    float *scratch = NULL;
    carve(args, false, cublaslt, workspace, &a, &scratch);
    if (args->seqs.cu_q.data != NULL)
        compress_cu_seqlens<<<1, 32, 0, stream>>>(a.sq, a.l, a.d, (int32_t *)args->seqs.cu_kv.data);
    quern_status status = linear(args) ? LAUNCHED("compress cu_seqlens") : means(args, a, true, true, stream);
    for (int i = 0; i < 2 && status == QUERN_OK; i++)
        if (present(*side_of(args, i).w))
            status = compress_matrix_forward(args, a, i, cublaslt, scratch, stream);
    return status;
}

static quern_status backward(const compress_args *args, bool cublaslt, void *workspace, cudaStream_t stream)
{
    compress_kernel a = kernel_of(args);
    float *scratch = NULL;
    carve(args, true, cublaslt, workspace, &a, &scratch);
    const bool mean0 = a.side[0].mean != NULL && present(args->d_w_k),
               mean1 = a.side[1].mean != NULL && present(args->d_w_v);
    quern_status status = means(args, a, mean0, mean1, stream);
    for (int i = 0; i < 2 && status == QUERN_OK; i++) {
        const side_args t = side_of(args, i);
        if (reaches(args, i)) {
            if (present(*t.w)) status = compress_matrix_backward(args, a, i, cublaslt, scratch, stream);
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
    return compress_parts_of(args->k.dtype).spread(a, pieces, chunks, stream);
}

static quern_status compress_forward_run(const stage_exec *exec, const compress_args *args, void *workspace)
{
    return forward(args, false, workspace, (cudaStream_t)exec->stream);
}

static quern_status compress_forward_cublaslt_run(const stage_exec *exec, const compress_args *args,
                                                  void *workspace)
{
    return forward(args, true, workspace, (cudaStream_t)exec->stream);
}

static quern_status backward_and_tail(const stage_exec *exec, const compress_args *args, bool cublaslt,
                                      void *workspace)
{
    quern_status status = backward(args, cublaslt, workspace, (cudaStream_t)exec->stream);
    if (args->accumulate) return status;
    if (status == QUERN_OK) status = fill_tail(exec, &args->seqs, true, &args->d_k, 0.0f);
    return status != QUERN_OK ? status : fill_tail(exec, &args->seqs, true, &args->d_v, 0.0f);
}

static quern_status compress_backward_run(const stage_exec *exec, const compress_args *args, void *workspace)
{
    return backward_and_tail(exec, args, false, workspace);
}

static quern_status compress_backward_cublaslt_run(const stage_exec *exec, const compress_args *args,
                                                   void *workspace)
{
    return backward_and_tail(exec, args, true, workspace);
}

extern const variant<compress_args> compress_forward_cublaslt = {
    "compress_forward_cublaslt", compress_cublaslt_supports, compress_forward_cublaslt_bytes,
    compress_forward_cublaslt_run};
extern const variant<compress_args> compress_forward_any = {"compress_forward_any", compress_supports,
                                                            compress_forward_bytes, compress_forward_run};
extern const variant<compress_args> compress_backward_cublaslt = {
    "compress_backward_cublaslt", compress_cublaslt_supports, compress_backward_cublaslt_bytes,
    compress_backward_cublaslt_run};
extern const variant<compress_args> compress_backward_any = {"compress_backward_any", compress_supports,
                                                             compress_backward_bytes, compress_backward_run};
