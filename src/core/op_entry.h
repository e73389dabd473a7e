/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_entry.h - what the files behind quern/op.h share. */
#ifndef QUERN_CORE_OP_ENTRY_H
#define QUERN_CORE_OP_ENTRY_H

#include "core/op.h"

/* The family of an operation; NULL where `op` is none. */
const op_family *op_family_of(const quern_op *op);
/* The same with an error. */
quern_status op_need(const quern_op *op, const op_family **family);

/* An error where p, an argument of that name, is NULL. */
quern_status op_need_pointer(const void *p, const char *name);

/* Where the name of an extent stands in the family's; returns its length, 0 where there is none. */
size_t op_symbol_name(const op_family *family, int32_t symbol, const char **name);

/* A parameter other than a float, as a number. */
int64_t op_param_value(const op_param *p, const void *params);
void op_param_store(const op_param *p, void *params, int64_t value);

#endif
