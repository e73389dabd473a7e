/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* convert.cu - conversion of dtypes. */
#include "variants.cuh"

extern const variant<convert_args> convert_any;

static const variant<convert_args> *const list[] = {&convert_any};
static const variants<convert_args> kernels(list);

static const stage_rows rows([](quern_backend &backend) { offer<convert_args, kernels>(backend.convert); });
