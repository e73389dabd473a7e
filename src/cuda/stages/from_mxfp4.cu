/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* from_mxfp4.cu - MXFP4 to NVFP4. */
#include "variants.cuh"

extern const variant<from_mxfp4_args> from_mxfp4_any;

static const variant<from_mxfp4_args> *const list[] = {&from_mxfp4_any};
static const variants<from_mxfp4_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<from_mxfp4_args, kernels>(backend.from_mxfp4);
});
