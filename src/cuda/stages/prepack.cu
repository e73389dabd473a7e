/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* prepack.cu - weights in the order of the grouped product. */
#include "variants.cuh"

extern const variant<prepack_args> prepack_any;

static const variant<prepack_args> *const list[] = {&prepack_any};
static const variants<prepack_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) { offer<prepack_args, kernels>(backend.prepack); });
