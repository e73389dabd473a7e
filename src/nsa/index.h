/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* index.h - what the block indexer and its loss share. Their tensors 0 and 1 are q_index and k_index, and
 * cu_seqlens_kv follows cu_seqlens_q. */
#ifndef QUERN_NSA_INDEX_H
#define QUERN_NSA_INDEX_H

#include "nsa/call.h"

enum {
    S_NQ = 1,
    S_NKV,
    S_TQ,
    S_TKV,
    S_BATCH,
    S_BATCH1,
    S_LISTS,
    S_WIDTH,
    S_BLOCKS,
    S_HEADS,
    S_DIM,
    S_LIST_ROWS,
    S_CHOSEN
};
enum { KEYS, KEY_ROWS }; /* shapes of k_index, fixed length and varlen */
extern const char *const nsa_index_symbols[], *const nsa_index_leads[];

/* Checks q_index and k_index, which are given. Sets the symbols up to S_WIDTH, S_LIST_ROWS, and k_index's
 * shapes. */
quern_status nsa_index_derive(op_call *call);
quern_status nsa_index_check_data(const op_call *call, void *const *data);
stage_seqs nsa_index_seqs(const op_call *call);

#endif
