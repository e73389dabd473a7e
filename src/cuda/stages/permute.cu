/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* permute.cu - rows to other places. */
#include "variants.cuh"

extern const variant<permute_args> permute_any;

static const variant<permute_args> *const list[] = {&permute_any};
static const variants<permute_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) { offer<permute_args, kernels>(backend.permute); });
