/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* stored.h - in which encoding the tensors of a module store its weight. */
#ifndef QUERN_QUANTIZE_STORED_H
#define QUERN_QUANTIZE_STORED_H

#include "quantize/modules.h"

/* Reads shapes and dtypes of s->of into the matrix. False: it is no weight of a linear module, nor a stack of
 * them, and is copied. */
bool stored_read(stored_weight *s, bool gpt_oss);

#endif
