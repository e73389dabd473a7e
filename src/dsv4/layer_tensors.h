/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* layer_tensors.h - the tensors that a layer's schemas have in common, in the order of their structs. */
#ifndef QUERN_DSV4_LAYER_TENSORS_H
#define QUERN_DSV4_LAYER_TENSORS_H

/* The weights with gradients, in the order of the struct: field, name in files, extents. */
#define LAYER_TRAINED(ROW)                                                                                   \
    ROW(sinks, "sinks", LS_H)                                                                                \
    ROW(q_a, "q_a_proj.weight", LS_Q_LORA, LS_IN)                                                            \
    ROW(q_a_norm, "q_a_norm.weight", LS_Q_LORA)                                                              \
    ROW(q_b, "q_b_proj.weight", LS_HD, LS_Q_LORA)                                                            \
    ROW(kv, "kv_proj.weight", LS_D, LS_IN)                                                                   \
    ROW(kv_norm, "kv_norm.weight", LS_D)                                                                     \
    ROW(o_a, "o_a_proj.weight", LS_GO, LS_GROUP)                                                             \
    ROW(o_b, "o_b_proj.weight", LS_IN, LS_GO)                                                                \
    ROW(compressor_bias, "compressor.position_bias", LS_R, LS_SERIES)                                        \
    ROW(compressor_kv, "compressor.kv_proj.weight", LS_SERIES, LS_IN)                                        \
    ROW(compressor_gate, "compressor.gate_proj.weight", LS_SERIES, LS_IN)                                    \
    ROW(compressor_norm, "compressor.kv_norm.weight", LS_D)
/* The indexer's, which have none. */
#define LAYER_CHOOSING(ROW)                                                                                  \
    ROW(indexer_bias, "compressor.indexer.position_bias", LS_R, LS_2CI)                                      \
    ROW(indexer_kv, "compressor.indexer.kv_proj.weight", LS_2CI, LS_IN)                                      \
    ROW(indexer_gate, "compressor.indexer.gate_proj.weight", LS_2CI, LS_IN)                                  \
    ROW(indexer_norm, "compressor.indexer.kv_norm.weight", LS_CI)                                            \
    ROW(indexer_q_b, "compressor.indexer.q_b_proj.weight", LS_HICI, LS_Q_LORA)                               \
    ROW(indexer_heads, "compressor.indexer.scorer.weights_proj.weight", LS_HI, LS_IN)
#define LAYER_WEIGHT(field, name, ...) {#field, "w." name, OP_FLOAT, OP_NONE, {__VA_ARGS__}, {0}},

/* x and the weights; the results. */
#define LAYER_INPUTS                                                                                         \
    {"x", "X", OP_ACTIVATION, OP_NONE, {LL_TOKENS, LS_IN}, {0}},                                             \
        {"cos_sin", "cos_sin", OP_FLOAT, OP_NONE, {LS_P, LS_ROPE}, {0}},                                     \
        LAYER_TRAINED(LAYER_WEIGHT) LAYER_CHOOSING(LAYER_WEIGHT)
#define LAYER_RESULTS                                                                                        \
    {"out", "out", OP_ACTIVATION, OP_NONE, {LL_TOKENS, LS_IN}, {0}},                                         \
        {"q_residual", "q_residual", OP_ACTIVATION, OP_NONE, {LL_TOKENS, LS_Q_LORA}, {0}},                   \
        {"q", "q", OP_ACTIVATION, OP_NONE, {LL_BATCH, LS_H, LS_T, LS_D}, {0}},                               \
        {"kv_rows", "kv", OP_ACTIVATION, OP_NONE, {LL_TOKENS, LS_D}, {0}},                                   \
        {"compressed", "compressed", OP_ACTIVATION, OP_NONE, {LL_BATCH, LS_S, LS_D}, {0}},                   \
        {"idx_k", "idx.k", OP_ACTIVATION, OP_NONE, {LL_BATCH, LS_S, LS_CI}, {0}},                            \
        {"idx_q", "idx.q", OP_ACTIVATION, OP_NONE, {LL_TOKENS, LS_HI, LS_CI}, {0}},                          \
        {"idx_score", "idx.score", OP_F32, OP_NONE, {LL_TOKENS, LS_SCORES}, {0}},                            \
        {"idx_topk", "idx.topk", OP_I32, OP_NONE, {LL_TOKENS, LS_K}, {0}},                                   \
        {"core", "core", OP_ACTIVATION, OP_NONE, {LL_TOKENS, LS_H, LS_D}, {0}},                              \
        {"core_irope", "core_irope", OP_ACTIVATION, OP_NONE, {LL_TOKENS, LS_H, LS_D}, {0}},                  \
        {"o_a_out", "o_a", OP_ACTIVATION, OP_NONE, {LL_TOKENS, LS_G, LS_O_LORA}, {0}},

/* The extents' names, from the first on. */
#define LAYER_SYMBOLS                                                                                        \
    "T Dm q_lora H D HD G HD/G o_lora G*o_lora r 2D|D S Hi C_I 2C_I Hi*C_I S k P R 4D|2D 4C_I"

#endif
