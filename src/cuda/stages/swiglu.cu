/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* swiglu.cu - SwiGLU. */
#include "variants.cuh"

extern const variant<swiglu_args> swiglu_forward_any, swiglu_backward_any;

static const variant<swiglu_args> *const forward_list[] = {&swiglu_forward_any};
static const variants<swiglu_args> forward(forward_list);
static const variant<swiglu_args> *const backward_list[] = {&swiglu_backward_any};
static const variants<swiglu_args> backward(backward_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<swiglu_args, forward>(backend.swiglu_forward);
    offer<swiglu_args, backward>(backend.swiglu_backward);
});
