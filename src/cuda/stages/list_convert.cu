/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* list_convert.cu - lists of 64-bit entries. */
#include "variants.cuh"

extern const variant<list_convert_args> list_convert_any;

static const variant<list_convert_args> *const list[] = {&list_convert_any};
static const variants<list_convert_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<list_convert_args, kernels>(backend.list_convert);
});
