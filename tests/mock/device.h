/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * device.h - a device for tests on machines without a GPU: device.c stands in for libquern_cuda, with the
 * CPU's stages. Its memory cannot be read or written except by a stage whose views lie there: host code that
 * follows a device's pointer ends the test with a segmentation fault. A fault of data becomes a bit of the
 * status word.
 */
#ifndef QUERN_MOCK_DEVICE_H
#define QUERN_MOCK_DEVICE_H

#include <stdbool.h>
#include <stddef.h>

/* Memory of the device whose address is `past` bytes (below 4096) after a multiple of 4096, with guards
 * before and behind it. Fails the test where there is none. */
void *mock_allocate(size_t bytes, size_t past);
/* Frees it; fails the test where a guard was written. NULL is allowed. */
void mock_free(void *p);
/* Copies bytes of which either side may be the device's. */
void mock_copy(void *to, const void *from, size_t bytes);
/* Copies to the host, and writes nothing where it has these bytes already. */
void mock_fetch(void *to, const void *from, size_t bytes);
void mock_fill(void *to, int value, size_t bytes);
/* Whether the address lies in a block of the device. */
bool mock_owns(const void *p);

/* Stages of this thread that are called between mock_record() and mock_recorded() do not run: they are
 * written down, with the addresses of their arguments. mock_replay() runs them, without any call of the
 * library; stages that may stand beside each other run in the reverse of the order in which they came. */
typedef struct mock_recording mock_recording;
void mock_record(void);
mock_recording *mock_recorded(void);
void mock_replay(const mock_recording *recording);
void mock_forget(mock_recording *recording);

/* The faults of data that this thread's stages have reported since the last call of this, as bits. */
int mock_take_faults(void);

/* How many stages have run on the device; how many of them in replays. */
long mock_stages_run(void);
long mock_stages_replayed(void);

#endif
