/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_mqa.cu - the variants of attention whose heads share keys that are values. */
#include "variants.cuh"

extern const variant<attend_mqa_args> attend_mqa_sm90, attend_mqa_sm90_decode, attend_mqa_sm90_tokens,
    attend_mqa_any, attend_mqa_backward_sm90, attend_mqa_backward_any;

static const variant<attend_mqa_args> *const forward_list[] = {
#ifdef QUERN_SM90
    &attend_mqa_sm90_decode,
    &attend_mqa_sm90_tokens,
    &attend_mqa_sm90,
#endif
    &attend_mqa_any,
};
static const variants<attend_mqa_args> forward(forward_list);

static const variant<attend_mqa_args> *const backward_list[] = {
#ifdef QUERN_SM90
    &attend_mqa_backward_sm90,
#endif
    &attend_mqa_backward_any,
};
static const variants<attend_mqa_args> backward(backward_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<attend_mqa_args, forward>(backend.attend_mqa_forward);
    offer<attend_mqa_args, backward>(backend.attend_mqa_backward);
});
