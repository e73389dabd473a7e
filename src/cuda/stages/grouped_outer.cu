/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* grouped_outer.cu - gradients of experts' matrices. */
#include "variants.cuh"

extern const variant<grouped_outer_args> grouped_outer_any;

static const variant<grouped_outer_args> *const list[] = {&grouped_outer_any};
static const variants<grouped_outer_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<grouped_outer_args, kernels>(backend.grouped_outer);
});
