/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "device.h"

#include "ceilings.h"
#include "job.h"
#include "values.h"

#include <quern/cuda.h>

#include <stdlib.h>
#include <string.h>

void *device_take(int device, size_t bytes)
{
    const size_t rounded = (bytes + 64) & ~(size_t)63, large = (size_t)4 << 20;
    void *p = NULL;
    if (bytes > SIZE_MAX / 4) return NULL;
    if (device == QUERN_CUDA) {
        if (quern_cuda_allocate(0, rounded, &p) != QUERN_OK) return NULL;
        if (quern_cuda_fill(0, p, 0, rounded, NULL) == QUERN_OK) return p;
        (void)quern_cuda_free(0, p);
        return NULL;
    }
    if (bytes >= large) return bench_allocate(bytes);
    if ((p = aligned_alloc(64, rounded)) != NULL) memset(p, 0, rounded);
    return p;
}

void device_free(int device, void *p)
{
    if (device == QUERN_CUDA) (void)quern_cuda_free(0, p);
    else free(p);
}

quern_status device_copy(int device, void *to, const void *from, size_t bytes)
{
    if (bytes == 0) return QUERN_OK;
    if (device == QUERN_CUDA) {
        const quern_status status = quern_cuda_copy(0, to, from, bytes, NULL);
        return status == QUERN_OK ? quern_cuda_synchronize(0, NULL) : status;
    }
    memcpy(to, from, bytes);
    return QUERN_OK;
}

quern_tensor device_tensor(int device, void *data, quern_dtype dtype, int32_t ndim, const int64_t *shape)
{
    quern_tensor t = quern_tensor_contiguous(data, dtype, ndim, shape);
    t.device = (quern_device)device;
    return t;
}

quern_tensor device_tensor_of(int device, const quern_tensor *host)
{
    const size_t bytes = (size_t)value_count(host) * quern_dtype_size(host->dtype);
    quern_tensor t = *host;
    t.device = (quern_device)device;
    t.data = device_take(device, bytes);
    if (t.data == NULL || device_copy(device, t.data, host->data, bytes) == QUERN_OK) return t;
    device_free(device, t.data);
    t.data = NULL;
    return t;
}

quern_status device_clock_open(device_clock *c, int device)
{
    quern_status status = QUERN_OK;
    *c = (device_clock){.device = device};
    for (int i = 0; i < 2 && device == QUERN_CUDA && status == QUERN_OK; i++)
        status = quern_cuda_event_create(0, &c->events[i]);
    return status;
}

quern_status device_clock_start(device_clock *c)
{
    c->start = now_ms();
    return c->device == QUERN_CUDA ? quern_cuda_event_record(0, c->events[0], NULL) : QUERN_OK;
}

quern_status device_clock_stop(device_clock *c, double *ms)
{
    if (c->device != QUERN_CUDA) {
        *ms = now_ms() - c->start;
        return QUERN_OK;
    }
    quern_status status = quern_cuda_event_record(0, c->events[1], NULL);
    if (status == QUERN_OK) status = quern_cuda_synchronize(0, NULL);
    return status == QUERN_OK ? quern_cuda_event_elapsed(0, c->events[0], c->events[1], ms) : status;
}

void device_clock_close(device_clock *c)
{
    for (int i = 0; i < 2; i++) (void)quern_cuda_event_destroy(0, c->events[i]);
}
