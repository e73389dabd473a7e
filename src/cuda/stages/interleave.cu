/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* interleave.cu - gate and up between halves and runs. */
#include "variants.cuh"

extern const variant<interleave_args> interleave_any;

static const variant<interleave_args> *const list[] = {&interleave_any};
static const variants<interleave_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<interleave_args, kernels>(backend.interleave);
});
