/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* hyper.cu - the variants of hyper-connections. */
#include "variants.cuh"

extern const variant<hyper_args> hyper_forward_once, hyper_forward_sm90, hyper_forward_four;
extern const variant<hyper_args> hyper_backward_four, hyper_forward_few, hyper_forward_any;
extern const variant<hyper_args> hyper_backward_any;

static const variant<hyper_args> *const forward_list[] = {
#ifdef QUERN_SM90
    &hyper_forward_once,
    &hyper_forward_sm90,
#endif
    &hyper_forward_four,
    &hyper_forward_few,
    &hyper_forward_any,
};
static const variants<hyper_args> forward(forward_list);
static const variant<hyper_args> *const backward_list[] = {&hyper_backward_four, &hyper_backward_any};
static const variants<hyper_args> backward(backward_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<hyper_args, forward>(backend.hyper_forward);
    offer<hyper_args, backward>(backend.hyper_backward);
});
