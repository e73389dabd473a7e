/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm.h - dense products C = A B or C += A B on one thread, by oneDNN where it is fastest. */
#ifndef QUERN_CPU_GEMM_H
#define QUERN_CPU_GEMM_H

#include "backend.h"
#include "cpu/kernels/attention_kernels.h"

#include <pthread.h>

enum { GEMM_DEPTH = 4096 }; /* sums are cut here, with and without oneDNN */

/* A full tile of a product, and the layout of its operands. dtype f32, or bf16 where the level has mm_bf16. A
 * is [m][lda], or [k][lda] if transposed (f32 only). The columns of B are in panels, as in
 * attention_kernels.h: row p, column j at j / panel * panel_stride + p * ldb + j % panel; panel_stride =
 * panel is a plain matrix. ldb and panel_stride count f32 or words of two bf16 neighbours along k (k then is
 * even); lda counts elements. C is f32 [m][ldc]; n rounded up to 16 columns of B are readable and of C
 * writable. */
typedef struct gemm_shape {
    quern_dtype dtype;
    int64_t m, n, k, lda;
    bool a_transposed;
    int64_t ldb, panel_stride, ldc;
} gemm_shape;

typedef struct gemm {
    gemm_shape shape;
    const attention_kernels *kernels;
    const struct gemm_primitive *store, *add; /* oneDNN's for C = A B and C += A B; NULL: the own product */
    size_t scratch_bytes;                     /* that gemm_run() needs for each thread */
} gemm;

/* Plans a product. Makes oneDNN's primitives on first use of a shape and keeps them with the context. */
gemm gemm_plan(const stage_exec *exec, const gemm_shape *shape);
/* m, n, k are those of the shape or, in tails, less. Runs on the calling thread alone. */
void gemm_run(const gemm *g, int64_t m, int64_t n, int64_t k, const void *a, const void *b, float *c,
              bool accumulate, void *scratch);

/* A context's primitives, by shape. */
typedef struct gemm_cache {
    pthread_mutex_t lock;
    struct gemm_primitive *first;
    void *engine;
} gemm_cache;
void gemm_cache_open(gemm_cache *cache);
void gemm_cache_close(gemm_cache *cache);

#endif
