/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* validate_lists.cu - the check of lists. */
#include "variants.cuh"

extern const variant<validate_lists_args> validate_lists_any;

static const variant<validate_lists_args> *const list[] = {&validate_lists_any};
static const variants<validate_lists_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<validate_lists_args, kernels>(backend.validate_lists);
});
