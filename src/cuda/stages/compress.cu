/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* compress.cu - compression's variants. */
#include "variants.cuh"

extern const variant<compress_args> compress_forward_cublaslt, compress_forward_any,
    compress_backward_cublaslt, compress_backward_any;

static const variant<compress_args> *const forward_list[] = {&compress_forward_cublaslt,
                                                             &compress_forward_any};
extern const variants<compress_args> compress_forward_variants(forward_list);
static const variant<compress_args> *const backward_list[] = {&compress_backward_cublaslt,
                                                              &compress_backward_any};
static const variants<compress_args> backward(backward_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<compress_args, compress_forward_variants>(backend.compress_forward);
    offer<compress_args, backward>(backend.compress_backward);
});
