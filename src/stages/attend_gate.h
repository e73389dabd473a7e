/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* attend_gate.h - the forward of three branches (compressed, selected, window) with their gate, in one pass
 * per tile, without the branches' outputs in memory. */
#ifndef QUERN_STAGES_ATTEND_GATE_H
#define QUERN_STAGES_ATTEND_GATE_H

#include "stages/attend.h"
#include "stages/gate.h"
#include "stages/select.h"

typedef struct attend_gate_args {
    attend_args branch[3]; /* cmp, slc, win; mask fields set, o absent unless wanted */
    uint32_t branches;
    bool separate[3];   /* the branch reads keys and values of its own */
    select_args select; /* computed inside where select.blocks was not handed in */
    bool select_given;
    bool lists_wanted;    /* select's blocks and counts are results; else they need not be written */
    bool behind_compress; /* the stage before it on the stream makes its entries */
    gate_args gate;
} attend_gate_args;
STAGE_DECLARE(attend_gate);
/* The views are those of the members' own lists. */
#define ATTEND_GATE_MEMBERS(F) F(branch[0]) F(branch[1]) F(branch[2]) F(select) F(gate)
#define ATTEND_GATE_VALUES(F)                                                                                \
    F(branches)                                                                                              \
    F(separate[0]) F(separate[1]) F(separate[2]) F(select_given) F(lists_wanted) F(behind_compress)

#endif
