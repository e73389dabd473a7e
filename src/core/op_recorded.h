/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * op_recorded.h - calls whose launches a stream records one after the other (a capture of the caller's). Each
 * waits for those calls alone whose memory it needs, and what the caller records behind them for all. A call
 * that finds other work behind the last one waits for all of it.
 */
#ifndef QUERN_CORE_OP_RECORDED_H
#define QUERN_CORE_OP_RECORDED_H

#include "backend.h"
#include "core/op_span.h"

#include <stdatomic.h>

/* The calls since the last one that waits for all, up to as many as a word has bits. */
enum { RECORDED_CALLS = 64, RECORDED_SPANS = 1024 };
typedef struct op_recorded {
    atomic_flag busy;
    int32_t calls, spans, end[RECORDED_CALLS]; /* spans of call i end at end[i] */
    uint64_t before[RECORDED_CALLS];           /* those that call i waits for, by others or itself */
    uint64_t last;                             /* those that none waits for */
    backend_point start, after[RECORDED_CALLS], left;
    op_span span[RECORDED_SPANS];
} op_recorded;

/* Before and behind a call's launches, which reach into these spans. False, and nothing is to be ended, where
 * nothing is recorded, or where another thread's call is. */
bool op_recorded_begin(op_recorded *r, const quern_backend *backend, const stage_exec *exec,
                       const op_span *spans, int32_t count);
quern_status op_recorded_end(op_recorded *r, const quern_backend *backend, const stage_exec *exec);

#endif
