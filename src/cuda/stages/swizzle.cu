/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* swizzle.cu - scales in the order of tensor cores. */
#include "variants.cuh"

extern const variant<swizzle_args> swizzle_any;

static const variant<swizzle_args> *const list[] = {&swizzle_any};
static const variants<swizzle_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) { offer<swizzle_args, kernels>(backend.swizzle); });
