/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op.h - what every operation shares: the size rule of the structs that callers fill. */
#ifndef QUERN_CORE_OP_H
#define QUERN_CORE_OP_H

#include <quern/quern.h>

/*
 * The size rule. `known` is this library's struct at its defaults, size set; the bytes of `given`, whose size may be
 * another, are copied over it. A smaller struct leaves the rest at the defaults. A larger one is accepted where its tail
 * is zero. Refused are NULL, a size that no struct has, and a tail with a byte set; *known is then unspecified.
 */
quern_status op_struct(void *known, const void *given, const char *name, const char *init);
/* The same the other way, for a struct that the library fills: copies *known over the fields that `given` has. `given`
 * has passed op_struct(). */
void op_struct_give(void *given, const void *known);

/* *exec from what the caller gave; NULL: the defaults. */
quern_status op_exec(const quern_exec *given, quern_exec *exec);

#endif
