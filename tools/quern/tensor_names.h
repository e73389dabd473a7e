/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* tensor_names.h - which operation's tensors the library's sentences speak of. */
#ifndef QUERN_TOOLS_TENSOR_NAMES_H
#define QUERN_TOOLS_TENSOR_NAMES_H

#include "ops.h"

/* From now on failures are told with the names that this operation's tensors have in files. Both are kept. */
void tensor_names_of(const operation *subject, const any_params *given);
/* The sentence with these names. */
void tensor_names_put(const char *sentence, char *text, size_t bytes);

#endif
