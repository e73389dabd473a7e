/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* grouped_dense.cu - experts' products in floats. */
#include "variants.cuh"

extern const variant<grouped_dense_args> grouped_dense_gemm, grouped_dense_any;

static const variant<grouped_dense_args> *const list[] = {&grouped_dense_gemm, &grouped_dense_any};
static const variants<grouped_dense_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<grouped_dense_args, kernels>(backend.grouped_dense);
});
