/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* select.cu - the variants of NSA's selection. */
#include "variants.cuh"

extern const variant<select_args> select_sm90, select_any;

static const variant<select_args> *const list[] = {
#ifdef QUERN_SM90
    &select_sm90,
#endif
    &select_any,
};
extern const variants<select_args> select_variants(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<select_args, select_variants>(backend.select);
});
