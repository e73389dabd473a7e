/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend.cu - attention's variants. */
#include "variants.cuh"

extern const variant<attend_args> attend_forward_sm90, attend_forward_sm90_by_block,
    attend_forward_sm90_tokens, attend_forward_wgmma, attend_forward_any, attend_forward_f32,
    attend_backward_sm90, attend_backward_sm90_lists, attend_backward_sm90_tokens, attend_backward_wgmma,
    attend_backward_any, attend_backward_f32;

static const variant<attend_args> *const forward_list[] = {
#ifdef QUERN_SM90
    &attend_forward_sm90, &attend_forward_sm90_by_block, &attend_forward_sm90_tokens, &attend_forward_wgmma,
#endif
    &attend_forward_any,  &attend_forward_f32,
};
extern const variants<attend_args> attend_forward_variants(forward_list);
static const variant<attend_args> *const backward_list[] = {
#ifdef QUERN_SM90
    &attend_backward_sm90, &attend_backward_sm90_lists, &attend_backward_sm90_tokens, &attend_backward_wgmma,
#endif
    &attend_backward_any,  &attend_backward_f32,
};
static const variants<attend_args> backward(backward_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<attend_args, attend_forward_variants>(backend.attend_forward);
    offer<attend_args, backward>(backend.attend_backward);
});
