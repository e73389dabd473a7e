/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* gate.h - gates of three branches and their weighted sum, forward and backward. */
#ifndef QUERN_STAGES_GATE_H
#define QUERN_STAGES_GATE_H

#include "stages/stage.h"

typedef enum gate_kind { GATE_NONE = 0, GATE_WEIGHTS = 1, GATE_GIVEN = 2 } gate_kind; /* NONE: 1/3 each */

typedef struct gate_args {
    stage_seqs seqs;
    gate_kind kind;
    quern_tensor q, w_gate, gates; /* gates: written unless kind is GIVEN; may be absent */
    quern_tensor o_b[3];           /* the branches; absent: 0 */
    quern_tensor o;                /* absent: gates only. May be the memory of one o_b */
    /* Backward. delta[b] = gate * rowsum(d_o * o_b), f32 [B,H,N], and d_o_b = gate * d_o are optional; d_q
     * f32 (added to where accumulate) or act; d_w_gate or d_gates by kind. */
    quern_tensor d_o, d_o_b[3], delta[3], d_q, d_w_gate, d_gates;
    bool accumulate;
} gate_args;
STAGE_DECLARE(gate);
#define GATE_TENSORS(IN, OUT, GRAD)                                                                          \
    STAGE_SEQS_TENSORS(IN)                                                                                   \
    IN(q)                                                                                                    \
    IN(w_gate)                                                                                               \
    OUT(gates) IN(o_b[0]) IN(o_b[1]) IN(o_b[2]) OUT(o) IN(d_o) GRAD(d_o_b[0]) GRAD(d_o_b[1]) GRAD(d_o_b[2])  \
        GRAD(delta[0]) GRAD(delta[1]) GRAD(delta[2]) GRAD(d_q) GRAD(d_w_gate) GRAD(d_gates)
#define GATE_VALUES(F) STAGE_SEQS_VALUES(F) F(kind) F(accumulate)

#endif
