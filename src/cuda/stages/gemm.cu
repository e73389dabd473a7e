/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gemm.cu - dense products' variants. */
#include "variants.cuh"

extern const variant<gemm_args> gemm_sm90_few, gemm_cublaslt, gemm_any;

static const variant<gemm_args> *const list[] = {
#ifdef QUERN_SM90
    &gemm_sm90_few,
#endif
    &gemm_cublaslt,
    &gemm_any,
};
extern const variants<gemm_args> gemm_variants(list);

#ifdef QUERN_SM90
bool gemm_together(const stage_exec *exec, const gemm_args *const *list, int32_t count, quern_status *status);
#endif

static const stage_rows rows([](quern_backend &backend) {
    offer<gemm_args, gemm_variants>(backend.gemm);
#ifdef QUERN_SM90
    backend.gemm_together = gemm_together;
#endif
});
