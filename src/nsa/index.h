/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index.h - what the block indexer and its loss share. Their tensors 0 and 1 are q_index and k_index, and
 * cu_seqlens_kv follows cu_seqlens_q. */
#ifndef QUERN_NSA_INDEX_H
#define QUERN_NSA_INDEX_H

#include "nsa/call.h"

extern const char *const nsa_index_leads[]; /* of LEAD_KEYS and LEAD_KEY_ROWS */

/* Checks q_index and k_index, which are given. Sets the batch, tokens, rows of lists, and the shapes of
 * k_index. */
quern_status nsa_index_derive(op_call *call);
quern_status nsa_index_check_data(const op_call *call, void *const *data);
stage_seqs nsa_index_seqs(const op_call *call);

#endif
