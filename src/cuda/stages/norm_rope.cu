/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* norm_rope.cu - the variants of norm and rotation between a projection and the core. */
#include "variants.cuh"

extern const variant<norm_rope_args> norm_rope_aligned, norm_rope_forward_any, norm_rope_backward_any;

static const variant<norm_rope_args> *const forward_list[] = {&norm_rope_aligned, &norm_rope_forward_any};
static const variants<norm_rope_args> forward(forward_list);
static const variant<norm_rope_args> *const backward_list[] = {&norm_rope_backward_any};
static const variants<norm_rope_args> backward(backward_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<norm_rope_args, forward>(backend.norm_rope_forward);
    offer<norm_rope_args, backward>(backend.norm_rope_backward);
});
