/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* rowdot.cu - the dot products of rows. */
#include "variants.cuh"

extern const variant<rowdot_args> rowdot_any;

static const variant<rowdot_args> *const list[] = {&rowdot_any};
static const variants<rowdot_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) { offer<rowdot_args, kernels>(backend.rowdot); });
