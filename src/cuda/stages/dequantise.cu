/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dequantise.cu - NVFP4 to values. */
#include "variants.cuh"

extern const variant<dequantise_args> dequantise_any;

static const variant<dequantise_args> *const list[] = {&dequantise_any};
static const variants<dequantise_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<dequantise_args, kernels>(backend.dequantise);
});
