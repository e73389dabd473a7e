/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dlpack.c - views to and from DLPack's tensors. The codes are DLPack's own. */
#include <quern/dlpack.h>

#include "core/error.h"

typedef struct dl_tensor {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5, DL_BOOL = 6 };
enum { DL_E4M3FN = 10, DL_E4M3FNUZ = 11, DL_E5M2 = 12, DL_E5M2FNUZ = 13, DL_E8M0FNU = 14, DL_E2M1FN = 17 };

static const struct {
    quern_dtype dtype;
    uint8_t code, bits, lanes;
} dtypes[] = {
    {QUERN_F32, DL_FLOAT, 32, 1},
    {QUERN_F16, DL_FLOAT, 16, 1},
    {QUERN_BF16, DL_BFLOAT, 16, 1},
    {QUERN_F64, DL_FLOAT, 64, 1},
    {QUERN_I8, DL_INT, 8, 1},
    {QUERN_I16, DL_INT, 16, 1},
    {QUERN_I32, DL_INT, 32, 1},
    {QUERN_I64, DL_INT, 64, 1},
    {QUERN_U8, DL_UINT, 8, 1},
    {QUERN_U16, DL_UINT, 16, 1},
    {QUERN_U32, DL_UINT, 32, 1},
    {QUERN_U64, DL_UINT, 64, 1},
    {QUERN_BOOL, DL_BOOL, 8, 1},
    {QUERN_C64, DL_COMPLEX, 64, 1},
    {QUERN_E4M3, DL_E4M3FN, 8, 1},
    {QUERN_E5M2, DL_E5M2, 8, 1},
    {QUERN_E8M0, DL_E8M0FNU, 8, 1},
    {QUERN_E2M1X2, DL_E2M1FN, 4, 2},
    {QUERN_E4M3FNUZ, DL_E4M3FNUZ, 8, 1},
    {QUERN_E5M2FNUZ, DL_E5M2FNUZ, 8, 1},
};
enum { DTYPES = sizeof dtypes / sizeof *dtypes };

static quern_status need(const void *p, const char *name)
{
    return p != NULL ? QUERN_OK : error_argument("%s is NULL: a tensor is needed", name);
}

static quern_status check_ndim(const char *name, int32_t ndim)
{
    if (ndim >= 0 && ndim <= QUERN_MAX_DIMS) return QUERN_OK;
    return error_argument("%s has %d dimensions: 0 to %d are accepted", name, ndim, QUERN_MAX_DIMS);
}

quern_status quern_tensor_from_dlpack(const void *from, quern_tensor *tensor)
{
    const dl_tensor *d = from;
    quern_tensor t = {0};
    int dtype = 0;
    quern_status status = need(d, "dl_tensor");
    if (status == QUERN_OK) status = need(tensor, "tensor");
    if (status == QUERN_OK) status = check_ndim("dl_tensor", d->ndim);
    if (status == QUERN_OK && d->ndim > 0) status = need(d->shape, "dl_tensor.shape");
    if (status != QUERN_OK) return status;
    while (dtype < DTYPES && (dtypes[dtype].code != d->code || dtypes[dtype].bits != d->bits ||
                              dtypes[dtype].lanes != d->lanes))
        dtype++;
    if (dtype == DTYPES)
        return error_argument(
            "dl_tensor's dtype has code %d, %d bits, %d lanes: those listed in quern/dlpack.h are accepted",
            d->code, d->bits, d->lanes);
    const bool host = d->device_type == DL_CPU || d->device_type == DL_CUDA_HOST;
    if (!host && d->device_type != DL_CUDA && d->device_type != DL_CUDA_MANAGED)
        return error_argument("dl_tensor's device type is %d: 1 (cpu), 2 (cuda), 3 (cuda host) and 13 (cuda "
                              "managed) are accepted",
                              d->device_type);
    t.dtype = dtypes[dtype].dtype;
    t.device = host ? QUERN_CPU : QUERN_CUDA;
    t.device_id = host ? 0 : d->device_id;
    t.ndim = d->ndim;
    t.data = d->data != NULL
                 ? (void *)((uintptr_t)d->data + d->byte_offset) // NOLINT(performance-no-int-to-ptr)
                 : NULL;
    int64_t stride = 1;
    bool empty = false; /* frameworks give strides of 0 to what has no elements */
    for (int32_t i = 0; i < d->ndim; i++) empty = empty || d->shape[i] == 0;
    for (int32_t i = d->ndim - 1; i >= 0; i--) {
        t.shape[i] = d->shape[i];
        t.strides[i] = d->strides != NULL && !empty ? d->strides[i] : stride;
        if (__builtin_mul_overflow(stride, d->shape[i] > 0 ? d->shape[i] : 1, &stride))
            stride = 0; /* the shape is refused by every call */
    }
    *tensor = t;
    return QUERN_OK;
}

quern_status quern_tensor_to_dlpack(quern_tensor *tensor, void *to)
{
    int dtype = 0;
    quern_status status = need(tensor, "tensor");
    if (status == QUERN_OK) status = need(to, "dl_tensor");
    if (status == QUERN_OK) status = check_ndim("tensor", tensor->ndim);
    if (status != QUERN_OK) return status;
    while (dtype < DTYPES && dtypes[dtype].dtype != tensor->dtype) dtype++;
    if (dtype == DTYPES)
        return error_argument("tensor: dtype %d: the values of quern_dtype are accepted", (int)tensor->dtype);
    if (tensor->device != QUERN_CPU && tensor->device != QUERN_CUDA)
        return error_argument("tensor: device %d: 0 (cpu) or 1 (cuda) is accepted", (int)tensor->device);
    dl_tensor *d = to;
    *d = (dl_tensor){tensor->data,        tensor->device == QUERN_CPU ? DL_CPU : DL_CUDA,
                     tensor->device_id,   tensor->ndim,
                     dtypes[dtype].code,  dtypes[dtype].bits,
                     dtypes[dtype].lanes, tensor->shape,
                     tensor->strides,     0};
    return QUERN_OK;
}
