/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* route.cu - the router. */
#include "variants.cuh"

extern const variant<route_args> route_forward_any, route_backward_any;

static const variant<route_args> *const forward_list[] = {&route_forward_any};
static const variants<route_args> forward(forward_list);
static const variant<route_args> *const backward_list[] = {&route_backward_any};
static const variants<route_args> backward(backward_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<route_args, forward>(backend.route_forward);
    offer<route_args, backward>(backend.route_backward);
});
