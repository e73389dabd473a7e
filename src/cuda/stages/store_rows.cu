/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* store_rows.cu - rows into slots of a cache. */
#include "variants.cuh"

extern const variant<store_rows_args> store_rows_any;

static const variant<store_rows_args> *const list[] = {&store_rows_any};
static const variants<store_rows_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<store_rows_args, kernels>(backend.store_rows);
});
