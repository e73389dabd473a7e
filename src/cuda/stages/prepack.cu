/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* prepack.cu - weights in the order of the grouped product. */
#include "variants.cuh"

extern const variant<prepack_args> prepack_any;
int64_t prepack_bytes(int64_t n, int64_t k); /* of an expert's repacked matrix */

static const variant<prepack_args> *const list[] = {&prepack_any};
static const variants<prepack_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<prepack_args, kernels>(backend.prepack);
    backend.repacked_bytes = prepack_bytes;
});
