/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * gemm.cu - the one file that knows cuBLASLt.
 *
 * libquern_cuda holds no reference to the library: it is opened when a call first asks for a product, so that
 * the rest runs on machines without it: QUERN_CUBLASLT names its file, else it lies beside libquern_cuda or
 * where the loader looks. Where it is absent compression multiplies in f32, slowly. A product's algorithm is
 * chosen once per device and shape, from those whose sums have a fixed order: whole sums, or shares that are
 * added in the scratch in f32. What was chosen stays in a table of fixed size, the oldest replaced; the lock
 * is held while a product is put into its stream, which is when the descriptors are read. Making a handle and
 * loading a kernel may allocate, which a capture allows as the thread's mode is relaxed (common/calls.cuh);
 * nothing of it becomes part of the graph.
 *
 * cuBLASLt's matrices are column-major, so it computes C^T = B^T A^T.
 */
#include "common/gemm.cuh"

size_t gemm_scratch_bytes(size_t c_bytes)
{
    const size_t most = (size_t)16 << 20;
    return c_bytes < most / 4 ? 4 * c_bytes : most;
}

#ifdef QUERN_CUBLASLT
#include "common/calls.cuh"
#include "core/library.h"

#include <cublasLt.h>

#include <pthread.h>
#include <string.h>

#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)

#define CALLS(X)                                                                                             \
    X(cublasLtCreate)                                                                                        \
    X(cublasLtMatmul)                                                                                        \
    X(cublasLtMatmulAlgoCheck)                                                                               \
    X(cublasLtMatmulAlgoConfigGetAttribute)                                                                  \
    X(cublasLtMatmulAlgoGetHeuristic)                                                                        \
    X(cublasLtMatmulDescCreate) X(cublasLtMatmulDescDestroy) X(cublasLtMatmulDescSetAttribute)               \
        X(cublasLtMatrixLayoutCreate) X(cublasLtMatrixLayoutDestroy) X(cublasLtMatrixLayoutSetAttribute)     \
            X(cublasLtMatmulPreferenceCreate) X(cublasLtMatmulPreferenceDestroy)                             \
                X(cublasLtMatmulPreferenceSetAttribute)

enum { DEVICES = 64, PLANS = 64, CHOICES = 8, ANY_ROWS = 4096 /* for which an algorithm is chosen */ };

struct plan {
    int device;
    gemm_shape shape;
    cublasLtMatmulDesc_t product; /* NULL: a free place */
    cublasLtMatrixLayout_t layout[3];
    cublasLtMatmulAlgo_t algorithm;
};

#define MEMBER(name) decltype(&::name) name;
static struct {
    CALLS(MEMBER)
} lt;
static bool loaded;
static pthread_once_t load_once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* what follows is used under it */
static cublasLtHandle_t handles[DEVICES];
static plan plans[PLANS];
static int next_plan;

static void load()
{
    void *library = library_open("libcublasLt.so." TEXT(CUBLAS_VER_MAJOR), "QUERN_CUBLASLT", &loaded);
    if (library == NULL) return;
    loaded = true;
#define FIND(name) loaded = (*(void **)&lt.name = dlsym(library, #name)) != NULL && loaded;
    CALLS(FIND)
}

bool gemm_available()
{
    (void)pthread_once(&load_once, load);
    return loaded;
}

static cublasStatus_t make_layout(cublasLtMatrixLayout_t *layout, cudaDataType_t type, int64_t rows,
                                  int64_t columns, int64_t ld, int64_t batch, int64_t stride)
{
    const int32_t count = (int32_t)batch;
    cublasStatus_t status =
        lt.cublasLtMatrixLayoutCreate(layout, type, (uint64_t)rows, (uint64_t)columns, ld);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt.cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count,
                                                     sizeof count);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt.cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                     &stride, sizeof stride);
    return status;
}

static cublasStatus_t describe(plan *p)
{
    const gemm_shape &s = p->shape;
    const cudaDataType_t type = s.f16 ? CUDA_R_16F : CUDA_R_16BF;
    const cublasOperation_t first = s.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                            second = s.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t status = lt.cublasLtMatmulDescCreate(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (status == CUBLAS_STATUS_SUCCESS)
        status =
            lt.cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt.cublasLtMatmulDescSetAttribute(p->product, CUBLASLT_MATMUL_DESC_TRANSB, &second,
                                                   sizeof second);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = make_layout(&p->layout[0], type, s.b_transposed ? s.k : s.n, s.b_transposed ? s.n : s.k,
                             s.ldb, s.batch, s.b_stride);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = make_layout(&p->layout[1], type, s.a_transposed ? s.m : s.k, s.a_transposed ? s.k : s.m,
                             s.lda, s.batch, s.a_stride);
    if (status == CUBLAS_STATUS_SUCCESS)
        status =
            make_layout(&p->layout[2], s.c_half ? type : CUDA_R_32F, s.n, s.m, s.ldc, s.batch, s.c_stride);
    return status;
}

/* Whether a product's sums are not cut into shares. */
static bool is_whole(const cublasLtMatmulAlgo_t *algorithm)
{
    int32_t shares = 0;
    size_t written = 0;
    return lt.cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &shares,
                                                   sizeof shares, &written) == CUBLAS_STATUS_SUCCESS &&
           shares <= 1;
}

static cublasStatus_t choose(plan *p)
{
    static const cublasLtMatmulPreferenceAttributes_t aligned[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, alignment = GEMM_ALIGN;
    const uint64_t scratch = (uint64_t)p->shape.scratch_bytes;
    cublasLtMatmulPreference_t wanted = NULL;
    cublasLtMatmulHeuristicResult_t found[CHOICES];
    int count = 0;
    cublasStatus_t status = lt.cublasLtMatmulPreferenceCreate(&wanted);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    status = lt.cublasLtMatmulPreferenceSetAttribute(wanted, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                     &scratch, sizeof scratch);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt.cublasLtMatmulPreferenceSetAttribute(wanted, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                         &reductions, sizeof reductions);
    for (int i = 0; i < 4 && status == CUBLAS_STATUS_SUCCESS; i++)
        status = lt.cublasLtMatmulPreferenceSetAttribute(wanted, aligned[i], &alignment, sizeof alignment);
    if (status == CUBLAS_STATUS_SUCCESS)
        status =
            lt.cublasLtMatmulAlgoGetHeuristic(handles[p->device], p->product, p->layout[0], p->layout[1],
                                              p->layout[2], p->layout[2], wanted, CHOICES, found, &count);
    (void)lt.cublasLtMatmulPreferenceDestroy(wanted);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    for (int i = 0; i < count; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS && found[i].workspaceSize <= scratch &&
            (!p->shape.any_rows || is_whole(&found[i].algo))) {
            p->algorithm = found[i].algo;
            return CUBLAS_STATUS_SUCCESS;
        }
    return CUBLAS_STATUS_NOT_SUPPORTED;
}

/* Whether an algorithm that was chosen for another number of rows computes this product. */
static bool takes(const plan *p, const cublasLtMatmulAlgo_t *algorithm)
{
    cublasLtMatmulHeuristicResult_t result;
    return lt.cublasLtMatmulAlgoCheck(handles[p->device], p->product, p->layout[0], p->layout[1],
                                      p->layout[2], p->layout[2], algorithm,
                                      &result) == CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= (size_t)p->shape.scratch_bytes;
}

static void forget(plan *p)
{
    if (p->product != NULL) (void)lt.cublasLtMatmulDescDestroy(p->product);
    for (int i = 0; i < 3; i++)
        if (p->layout[i] != NULL) (void)lt.cublasLtMatrixLayoutDestroy(p->layout[i]);
    memset(p, 0, sizeof *p);
}

/* The lock is held. */
static cublasStatus_t plan_for(int device, const gemm_shape &shape, const plan **found)
{
    for (int i = 0; i < PLANS; i++)
        if (plans[i].product != NULL && plans[i].device == device &&
            memcmp(&plans[i].shape, &shape, sizeof shape) == 0) {
            *found = &plans[i];
            return CUBLAS_STATUS_SUCCESS;
        }
    cublasStatus_t status =
        handles[device] == NULL ? lt.cublasLtCreate(&handles[device]) : CUBLAS_STATUS_SUCCESS;
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    plan *p = &plans[next_plan];
    next_plan = (next_plan + 1) % PLANS;
    forget(p);
    p->device = device;
    p->shape = shape;
    if (shape.any_rows) p->shape.m = ANY_ROWS;
    if (shape.any_rows && shape.a_transposed && shape.lda < ANY_ROWS)
        p->shape.lda = ANY_ROWS; /* whose rows hold m, then */
    status = describe(p);
    if (status == CUBLAS_STATUS_SUCCESS) status = choose(p);
    if (status == CUBLAS_STATUS_SUCCESS && shape.any_rows) {
        const cublasLtMatmulAlgo_t chosen = p->algorithm;
        forget(p);
        p->device = device;
        p->shape = shape;
        status = describe(p);
        if (status == CUBLAS_STATUS_SUCCESS && !takes(p, &chosen)) status = choose(p);
        else p->algorithm = chosen;
    }
    if (status != CUBLAS_STATUS_SUCCESS) forget(p);
    *found = p;
    return status;
}

quern_status gemm_run(const gemm_shape &s, const void *a, const void *b, void *c, bool add, void *scratch,
                      cudaStream_t stream)
{
    const float one = 1.0f, old = add ? 1.0f : 0.0f;
    const plan *p = NULL;
    int device = 0;
    const cudaError_t code = cudaGetDevice(&device);
    if (code != cudaSuccess) return cuda_report(code, "asking for the device");
    if (device >= DEVICES)
        return cuda_set_error()(QUERN_ERR_UNSUPPORTED, "cuda:%d: products run on cuda:0 to cuda:%d", device,
                                DEVICES - 1);
    pthread_mutex_lock(&lock);
    cublasStatus_t status = plan_for(device, s, &p);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = lt.cublasLtMatmul(handles[device], p->product, &one, b, p->layout[0], a, p->layout[1], &old,
                                   c, p->layout[2], c, p->layout[2], &p->algorithm, scratch,
                                   (size_t)s.scratch_bytes, stream);
    pthread_mutex_unlock(&lock);
    if (status == CUBLAS_STATUS_SUCCESS) return QUERN_OK;
    (void)cudaGetLastError();
    const bool refused = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    return cuda_set_error()(refused ? QUERN_ERR_UNSUPPORTED : QUERN_ERR_DEVICE,
                            "cuda, a product of %lld x %lld x %lld: cuBLASLt's status %d", (long long)s.m,
                            (long long)s.n, (long long)s.k, (int)status);
}
#else
bool gemm_available()
{
    return false;
}

quern_status gemm_run(const gemm_shape &, const void *, const void *, void *, bool, void *, cudaStream_t)
{
    return QUERN_ERR_INTERNAL;
}
#endif
