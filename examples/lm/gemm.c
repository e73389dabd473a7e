/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm.c - the model's matrix products: oneDNN's sgemm where it was found, a plain loop otherwise. */
#include "lm.h"

#ifdef LM_ONEDNN
#include <oneapi/dnnl/dnnl.h>

void gemm(bool a_transposed, bool b_transposed, int64_t m, int64_t n, int64_t k, const float *a,
          const float *b, float *c, bool accumulate)
{
    dnnl_sgemm(a_transposed ? 'T' : 'N', b_transposed ? 'T' : 'N', m, n, k, 1.0f, a, a_transposed ? m : k, b,
               b_transposed ? k : n, accumulate ? 1.0f : 0.0f, c, n);
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
