/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm.cu - one expert that takes all rows (a shared one) is a dense product: by the kernels of that stage,
 * where they use the tensor cores. */
#include "variants.cuh"

static bool to_gemm(const grouped_dense_args *args, gemm_args *to)
{
    const quern_tensor &b = args->b;
    if (b.ndim != 3 || b.shape[0] != 1 || args->offsets.ndim > 0 || args->bias.ndim > 0) return false;
    *to = {};
    to->a = args->a;
    to->b = b;
    to->b.ndim = 2;
    for (int i = 0; i < 2; i++) to->b.shape[i] = b.shape[i + 1], to->b.strides[i] = b.strides[i + 1];
    to->c = args->c;
    to->b_transposed = args->b_transposed;
    to->accumulate = args->accumulate;
    return true;
}

static bool supports(const stage_exec *exec, const grouped_dense_args *args, char *)
{
    gemm_args to;
    char why[STAGE_WHY_BYTES];
    if (!to_gemm(args, &to)) return false;
    const variant<gemm_args> *v = gemm_variants.choose(exec, &to, why);
    return v != NULL && strcmp(v->name, "gemm_any") != 0;
}

static size_t workspace(const stage_exec *exec, const grouped_dense_args *args)
{
    gemm_args to;
    return to_gemm(args, &to) ? gemm_variants.workspace(exec, &to) : 0;
}

static quern_status run(const stage_exec *exec, const grouped_dense_args *args, void *memory)
{
    gemm_args to;
    (void)to_gemm(args, &to);
    return gemm_variants.run(exec, &to, memory);
}

extern const variant<grouped_dense_args> grouped_dense_gemm = {"grouped_dense_gemm", supports, workspace,
                                                               run};
