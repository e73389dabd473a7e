/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* quantise.cu - values to NVFP4. */
#include "variants.cuh"

extern const variant<quantise_args> quantise_any;

static const variant<quantise_args> *const list[] = {&quantise_any};
static const variants<quantise_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) { offer<quantise_args, kernels>(backend.quantise); });
