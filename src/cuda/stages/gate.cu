/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gate.cu - NSA's gate. */
#include "variants.cuh"

extern const variant<gate_args> gate_forward_any, gate_backward_any;

static const variant<gate_args> *const forward_list[] = {&gate_forward_any};
static const variants<gate_args> forward(forward_list);
static const variant<gate_args> *const backward_list[] = {&gate_backward_any};
static const variants<gate_args> backward(backward_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<gate_args, forward>(backend.gate_forward);
    offer<gate_args, backward>(backend.gate_backward);
});
