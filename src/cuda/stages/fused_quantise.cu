/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* fused_quantise.cu - a product's output to NVFP4. */
#include "variants.cuh"

extern const variant<fused_quantise_args> fused_quantise_any;

static const variant<fused_quantise_args> *const list[] = {&fused_quantise_any};
static const variants<fused_quantise_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<fused_quantise_args, kernels>(backend.fused_quantise);
});
