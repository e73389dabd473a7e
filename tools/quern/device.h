/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* device.h - memory of the device that a verb computes on, a quern_device: the CPU, or the first GPU. Copies
 * are done when the call returns. */
#ifndef QUERN_TOOLS_DEVICE_H
#define QUERN_TOOLS_DEVICE_H

#include <quern/quern.h>

/* Zeroed memory; NULL: there is not as much. */
void *device_take(int device, size_t bytes);
void device_free(int device, void *p);
/* Either side may be the host's. */
quern_status device_copy(int device, void *to, const void *from, size_t bytes);
/* A contiguous tensor in such memory. */
quern_tensor device_tensor(int device, void *data, quern_dtype dtype, int32_t ndim, const int64_t *shape);
/* A tensor with bytes of its own in such memory, copies of the contiguous one's in the host's; data NULL:
 * there is no memory. */
quern_tensor device_tensor_of(int device, const quern_tensor *host);

/* The time of calls: on a GPU of their work there, by events. Between two such, one after the other. */
typedef struct device_clock {
    int device;
    void *events[2];
    double start;
} device_clock;
quern_status device_clock_open(device_clock *c, int device);
quern_status device_clock_start(device_clock *c);
quern_status device_clock_stop(device_clock *c, double *ms);
void device_clock_close(device_clock *c);

#endif
