/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* expert_sums.cu - sums of experts' rows. */
#include "variants.cuh"

extern const variant<expert_sums_args> expert_sums_any;

static const variant<expert_sums_args> *const list[] = {&expert_sums_any};
static const variants<expert_sums_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<expert_sums_args, kernels>(backend.expert_sums);
});
