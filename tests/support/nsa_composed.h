/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_composed.h - NSA's forward from separate stages, whatever fused stage the backend offers. */
#ifndef QUERN_TEST_NSA_COMPOSED_H
#define QUERN_TEST_NSA_COMPOSED_H

#include <quern/nsa.h>

/* Like quern_nsa_forward_workspace and quern_nsa_forward. */
quern_status nsa_composed_workspace(quern_context *ctx, const quern_nsa_params *params,
                                    const quern_nsa_tensors *tensors, size_t *bytes);
quern_status nsa_composed_forward(quern_context *ctx, const quern_exec *exec, const quern_nsa_params *params,
                                  const quern_nsa_tensors *tensors, void *workspace, size_t workspace_bytes);

#endif
