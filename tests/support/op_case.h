/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * op_case.h - what quern/op.h says of an operation, for tests: its tensors' names, its struct of tensors,
 * calls by name. A case keeps its tensors in an array in the order of the family's struct; it may end before
 * the struct does.
 */
#ifndef QUERN_TEST_OP_CASE_H
#define QUERN_TEST_OP_CASE_H

#include "tensor.h"

#include <quern/op.h>

/* The name of a tensor in the family's struct. */
const char *op_case_field(const char *op, int tensor);
/* Fills a family's struct of tensors: those of t[count] that have a buffer and whose bit is in `set`. */
void op_case_bind(const char *op, const test_tensor *t, int count, uint64_t set, void *tensors);
#define OP_CASE_ALL UINT64_MAX

/* Calls with a workspace of exactly the size asked for; fails the test on an error. */
void op_case_call(quern_context *ctx, const char *op, quern_op_pass pass, const void *params,
                  const void *tensors);
/* The same with tensors bound to t[count]; fails the test where more than the results' elements changed. */
void op_case_run(quern_context *ctx, const char *op, quern_op_pass pass, const void *params,
                 const void *tensors, test_tensor *t, int count);

#endif
