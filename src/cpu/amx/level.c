/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* level.c - the level's own tables: products with bf16 weights. */
#include "cpu/levels.h"

extern const struct attention_kernels attention_kernels_amx;

const cpu_kernels cpu_kernels_amx = {.attention = &attention_kernels_amx};
