/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* decode.cu - the variants of attention of a step over pages, dense and sparse. */
#include "variants.cuh"

extern const variant<decode_args> decode_tensor, decode_plain;

static const variant<decode_args> *const list[] = {&decode_tensor, &decode_plain};
static const variants<decode_args> kernels(list);

extern const variant<nsa_decode_args> nsa_decode_tensor, nsa_decode_plain;

static const variant<nsa_decode_args> *const nsa_list[] = {&nsa_decode_tensor, &nsa_decode_plain};
static const variants<nsa_decode_args> nsa_kernels(nsa_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<decode_args, kernels>(backend.decode);
    offer<nsa_decode_args, nsa_kernels>(backend.nsa_decode);
});
