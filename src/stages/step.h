/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* step.h - the sequences of a step, for stages that read or write what a cache holds of them. */
#ifndef QUERN_STAGES_STEP_H
#define QUERN_STAGES_STEP_H

#include "stages/stage.h"

/* Sequence b of the call is number slots[b] of the cache, or none where that is -1. Its rows from
 * positions[b] on are rows[b, 0] ... rows[b, 1] - 1 of the call's tensors. A view of cu_seqlens [B + 1]
 * whose strides are both 1 is such rows. On the call's device. */
typedef struct stage_step {
    quern_tensor slots;            /* i32 or i64 [B] */
    quern_tensor positions;        /* i32 [B] */
    quern_tensor rows;             /* i32 [B, 2] */
} stage_step;
#define STAGE_STEP_TENSORS(F) F(step.slots) F(step.positions) F(step.rows)

#endif
