/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm.c - the model's matrix products: oneDNN's sgemm where it was found, a plain loop otherwise. */
#include "lm.h"

#ifdef LM_ONEDNN
#include <oneapi/dnnl/dnnl.h>

#include <stdlib.h>

enum { CODE_BYTES = 16 << 20 }; /* oneDNN writes its kernels without asking whether it got memory for them */
enum { PARTS = 16, LEAST_ROWS = 64 };

static void few_rows(int64_t m, int64_t n, int64_t k, const float *a, const float *b, float *c,
                     bool accumulate)
{
    for (int64_t i = 0; i < m; i++) {
        float *restrict row = c + i * n;
        int64_t p = 0;
        for (int64_t j = 0; j < n && !accumulate; j++) row[j] = 0.0f;
        for (; p + 4 <= k; p += 4) {
            const float *x = a + i * k + p, *w = b + p * n;
            for (int64_t j = 0; j < n; j++)
                row[j] += (x[0] * w[j] + x[1] * w[n + j]) + (x[2] * w[2 * n + j] + x[3] * w[3 * n + j]);
        }
        for (; p < k; p++)
            for (int64_t j = 0; j < n; j++) row[j] += a[i * k + p] * b[p * n + j];
    }
}

/* oneDNN would cut a product by the number of threads, on AVX2 also along k, and the bits with it. Here
 * rows are cut by the shape alone, and inside a team oneDNN takes one thread for each part. */
void gemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, const float *a,
          const float *b, float *c, bool accumulate)
{
    if (m <= FEW_ROWS && !a_transposed && !b_transposed) {
        few_rows(m, n, k, a, b, c, accumulate);
        return;
    }
    const int64_t even = (m + PARTS - 1) / PARTS, rows = even < LEAST_ROWS ? LEAST_ROWS : even;
    const bool room = room_for(CODE_BYTES);
    bool ok = true;
#pragma omp parallel for schedule(dynamic) reduction(&& : ok)
    for (int64_t i = 0; i < m; i += rows)
        ok = ok && room &&
             dnnl_sgemm(a_transposed ? 'T' : 'N', b_transposed ? 'T' : 'N', m - i < rows ? m - i : rows, n, k,
                        1.0f, a + (a_transposed ? i : i * k), a_transposed ? m : k, b, b_transposed ? k : n,
                        accumulate ? 1.0f : 0.0f, c + i * n, n) == dnnl_success;
    if (!ok) exit(3 * failure("no memory for a matrix product"));
}
#else
void gemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, const float *a,
          const float *b, float *c, bool accumulate)
{
#pragma omp parallel for
    for (int64_t i = 0; i < m; i++) {
        float *row = c + i * n;
        if (!accumulate)
            for (int64_t j = 0; j < n; j++) row[j] = 0.0f;
        for (int64_t p = 0; p < k; p++) {
            const float x = a_transposed ? a[p * m + i] : a[i * k + p];
            for (int64_t j = 0; j < n; j++) row[j] += x * (b_transposed ? b[j * k + p] : b[p * n + j]);
        }
    }
}
#endif
