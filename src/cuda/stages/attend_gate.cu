/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_gate.cu - NSA's three branches and their gate in one pass: optional, on Hopper alone. */
#include "variants.cuh"

#ifdef QUERN_SM90
extern const variant<attend_gate_args> attend_gate_sm90;

static const variant<attend_gate_args> *const list[] = {&attend_gate_sm90};
static const variants<attend_gate_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) {
    offer<attend_gate_args, kernels>(backend.attend_gate_forward);
});
#endif
