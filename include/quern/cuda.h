/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * cuda.h - NVIDIA GPUs: which there are, and what a program needs to hand device memory to the calls of the
 * other headers without linking CUDA itself. No CUDA header is needed: a stream is a cudaStream_t as `void
 * *`, NULL the default stream. Memory may come from cudaMalloc, PyTorch and the like, or from
 * quern_cuda_allocate().
 *
 * The GPU backend is a library of its own, libquern_cuda.so.0. The first call that needs it loads it: the
 * file that the environment variable QUERN_CUDA_LIBRARY names, else the one beside libquern, else where the
 * loader looks. A call whose tensors say QUERN_CUDA fails with
 *   QUERN_ERR_DEVICE            no such library, no GPU or driver, too old a driver, a device that does not
 *                               exist
 *   QUERN_ERR_UNSUPPORTED       a GPU of an architecture without kernels; a case that the backend does not
 *                               take
 *   QUERN_ERR_INVALID_ARGUMENT  a pointer that is not memory of the device that its tensor names
 *   QUERN_ERR_OUT_OF_MEMORY     quern_cuda_allocate() only: other calls need no memory
 * and leaves no CUDA error pending. As in CUDA, failures of the GPU's work itself appear at a later
 * synchronisation; quern_cuda_query() asks without waiting.
 *
 * No call changes the calling thread's current CUDA device. A stream belongs to the tensors' device.
 *
 * A context keeps CUDA graphs of calls that it saw twice on a stream (64 at most), by which they start at the
 * cost of one launch, as plans do (plan.h). Making a graph is the one moment at which such a call allocates;
 * where it fails, the kernels are launched one by one.
 */
#ifndef QUERN_CUDA_H
#define QUERN_CUDA_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Bits of the status word (quern_exec.status): faults in the data of a call's inputs. On a GPU only the
 * kernels read that data, so the call cannot refuse it: the fault sets its bit and has the neutral result
 * below. A CPU call refuses it before it writes anything, and quern_last_error() names tensor and element;
 * only entries of lists (the first two bits) are skipped and flagged there too. Each operation says beside
 * its tensors which bits it sets. The values are part of the ABI.
 */
enum {
    QUERN_STATUS_BAD_INDEX = 1,    /* a list has an entry outside its range: it is skipped */
    QUERN_STATUS_BAD_GROUP = 2,    /* the same, of a list of groups */
    QUERN_STATUS_BAD_OFFSETS = 4,  /* offsets such as cu_seqlens are not 0 = c[0] <= c[1] <= ... <= rows: they
                                    * are clamped into the tensor; a sequence that ends before it starts is
                                    * empty */
    QUERN_STATUS_BAD_POSITION = 8, /* a position, length or slot is outside its table: its row counts as
                                    * absent */
    QUERN_STATUS_BAD_PAGE = 16,    /* a page is not one of the pool's: its rows count as absent */
    QUERN_STATUS_BAD_ID = 32,      /* a token's or an expert's number is outside its range: its row is 0 */
    QUERN_STATUS_BAD_SCALE = 64,   /* a scale byte is no number that the format allows: it counts as 0 */
    QUERN_STATUS_BAD_GLOBAL = 128, /* a global scale is not finite and above 0: it counts as 0 */
    QUERN_STATUS_NOT_FINITE = 256  /* a value to be quantised is infinite or NaN: it counts as 0 */
};

/* What the lowest bit of a status word says: "a page that is not one of the pool's"; "" of 0. Static
 * storage. */
QUERN_API const char *quern_cuda_fault_name(int32_t bits);

typedef struct quern_cuda_device {
    size_t size;
    char name[256];
    int32_t compute_major, compute_minor, multiprocessors;
    int32_t driver, runtime; /* CUDA versions as 1000 major + 10 minor */
    int32_t reserved;
    int64_t memory_bytes, free_bytes, l2_bytes;
} quern_cuda_device;
#define QUERN_CUDA_DEVICE_INIT QUERN_SIZED(quern_cuda_device)

/* Loads the backend and says whether this device can compute. */
QUERN_API quern_status quern_cuda_check(int32_t device);
QUERN_API quern_status quern_cuda_device_count(int32_t *count);
/* Fills the fields of *info that its size covers. */
QUERN_API quern_status quern_cuda_device_get(int32_t device, quern_cuda_device *info);

/* Device memory. Freeing NULL is allowed; freeing waits for the device. */
QUERN_API quern_status quern_cuda_allocate(int32_t device, size_t bytes, void **p);
QUERN_API quern_status quern_cuda_free(int32_t device, void *p);
/* Copies between host and device memory, or within either, in the stream's order. Host memory that is not
 * page-locked: as a source it has been read when the call returns; as a target it may be written until the
 * stream's work is done. */
QUERN_API quern_status quern_cuda_copy(int32_t device, void *to, const void *from, size_t bytes,
                                       void *stream);
QUERN_API quern_status quern_cuda_fill(int32_t device, void *to, uint8_t value, size_t bytes, void *stream);

/* Streams. A created stream does not wait for the default stream. */
QUERN_API quern_status quern_cuda_stream_create(int32_t device, void **stream);
QUERN_API quern_status quern_cuda_stream_destroy(int32_t device, void *stream);
/* Waits for the stream's work; returns the error that it ended with. */
QUERN_API quern_status quern_cuda_synchronize(int32_t device, void *stream);
/* The same without waiting: *done is false while work is left. */
QUERN_API quern_status quern_cuda_query(int32_t device, void *stream, bool *done);

/* Events in a stream, for timing. *ms is the time between two of them; the call waits for the later one. */
QUERN_API quern_status quern_cuda_event_create(int32_t device, void **event);
QUERN_API quern_status quern_cuda_event_destroy(int32_t device, void *event);
QUERN_API quern_status quern_cuda_event_record(int32_t device, void *event, void *stream);
QUERN_API quern_status quern_cuda_event_elapsed(int32_t device, void *from, void *to, double *ms);

#ifdef __cplusplus
}
#endif
#endif
