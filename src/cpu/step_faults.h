/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * step_faults.h - faults of single sequences of a step. Where the caller has a tensor for them, the sequence
 * takes the bit and the stage goes on; else the stage fails with the first of them, once its results are safe
 * to follow.
 */
#ifndef QUERN_CPU_STEP_FAULTS_H
#define QUERN_CPU_STEP_FAULTS_H

#include "backend.h"

typedef struct step_faults {
    stage_exec exec;        /* what checks of sequences get; they report to `now` */
    stage_fault now, first; /* kind 0: none */
    bool apart;             /* the caller has a tensor for them */
} step_faults;

static inline void step_faults_begin(step_faults *f, const stage_exec *exec, bool apart)
{
    *f = (step_faults){.exec = *exec, .apart = apart};
    f->exec.fault = &f->now;
}

/* Takes what a check of a sequence has found; *word, or NULL, is its element of the caller's tensor. Whether
 * there is a fault. */
static inline bool step_faults_take(step_faults *f, quern_status status, int32_t *word)
{
    if (status == QUERN_OK) return false;
    if (!f->apart) {
        if (f->first.kind == 0) f->first = f->now;
        return true;
    }
    if (word != NULL) *word |= f->now.kind;
    if (f->exec.status != NULL) __atomic_fetch_or(f->exec.status, f->now.kind, __ATOMIC_RELAXED);
    return true;
}

static inline quern_status step_faults_end(const step_faults *f, const stage_exec *exec)
{
    return f->first.kind != 0 ? stage_report(exec, f->first) : QUERN_OK;
}

#endif
