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

/* ---- in op_tensors.c ---- */

static inline bool op_is_result(const op_call *call, int32_t tensor)
{
    const uint8_t role = call->role[tensor];
    return role == OP_RESULT || role == OP_OPTIONAL_RESULT || role == OP_UPDATED;
}
/* Each tensor alone, of the dtype and on the device that op_derive() found right. */
quern_status op_check_tensors(op_call *call, op_looks looks, op_used *used);
/* That no tensor that is written shares memory with another, and that addresses are of the device. */
quern_status op_check_memory(const op_call *call, const quern_tensor *const *given, const op_used *used);
/* The status word (NULL: none), and that it shares no memory with the tensors (NULL: skips this). */
quern_status op_check_status(const op_call *call, const quern_tensor *status,
                             const quern_tensor *const *given, const op_used *used);

#endif
