/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * kept_calls.h - the prepared calls that a context keeps. An ordinary call on the CPU that is made again,
 * with the same parameters and with tensors of which nothing but the addresses differs, aligned alike, is
 * not prepared again: it costs what a plan's run does.
 *
 * A slot belongs to one call at a time. Where a second thread makes the same call meanwhile, that one is
 * prepared.
 */
#ifndef QUERN_RUNTIME_KEPT_CALLS_H
#define QUERN_RUNTIME_KEPT_CALLS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct op_call;
struct op_family;
struct op_used;

/* KEPT_BYTES: of a call and what it is known by. Larger ones are not kept. */
enum { KEPT_CALLS = 32, KEPT_BYTES = 16384 };

typedef struct kept_call {
    atomic_uint_fast64_t key; /* a hash of the call that was last seen here; 0: none */
    atomic_bool taken;
    /* Where in `bytes`, after the call, there are: the caller's parameters, its tensors (as many as its
     * struct has; of a NULL one ndim is -1), and what preparing found of them. params_at 0: no call. */
    size_t params_at, params_bytes, tensors_at, used_at;
    int32_t tensor_count;
    _Alignas(16) char bytes[KEPT_BYTES];
} kept_call;

typedef struct kept_calls {
    kept_call slot[KEPT_CALLS];
} kept_calls;

/* A call as its caller makes it. */
typedef struct call_request {
    const struct op_family *family;
    int32_t operation;
    const void *params, *tensors;
} call_request;

/* A slot for the call, which kept_call_release() gives back: with the prepared call, or where *call is NULL
 * room for it. NULL, and NULL in *call: at the first sight of such a call, and while another has the slot. */
kept_call *kept_calls_take(kept_calls *all, const call_request *request, const struct op_call **call,
                           const struct op_used **used);
/* Puts a call that was just prepared, and whose `given` is NULL, into a slot that was taken for it. */
void kept_call_fill(kept_call *slot, const call_request *request, const struct op_call *call,
                    const struct op_used *used);
/* NULL is allowed. */
void kept_call_release(kept_call *slot);

#endif
