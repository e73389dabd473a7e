/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* combine.cu - sorted rows back to their tokens. */
#include "variants.cuh"

extern const variant<combine_args> combine_any;

static const variant<combine_args> *const list[] = {&combine_any};
static const variants<combine_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) { offer<combine_args, kernels>(backend.combine); });
