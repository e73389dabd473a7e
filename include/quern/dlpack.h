/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * dlpack.h - views to and from DLPack's DLTensor, without DLPack's own header: programs that have one include
 * both.
 *
 * A DLTensor is passed as `void *`. Its layout is that of every DLPack version so far (0.2 to 1.x), 48 bytes
 * where pointers have 8:
 *   void *data; int32_t device_type, device_id; int32_t ndim; uint8_t code, bits; uint16_t lanes;
 *   int64_t *shape, *strides; uint64_t byte_offset;
 * A DLManagedTensor (and one with a version) holds its DLTensor in the member dl_tensor: pass its address.
 * Ownership does not change: nothing is freed, no deleter is called, no memory is copied.
 *
 *   DLPack                                    here
 *   float 16, 32, 64; bfloat 16               QUERN_F16, F32, F64; BF16
 *   int 8, 16, 32, 64; uint 8, 16, 32, 64     QUERN_I8 ... I64; U8 ... U64
 *   bool 8; complex 64                        QUERN_BOOL; C64
 *   float8_e4m3fn, float8_e5m2, float8_e8m0fnu  QUERN_E4M3, E5M2, E8M0
 *   float8_e4m3fnuz, float8_e5m2fnuz          QUERN_E4M3FNUZ, E5M2FNUZ
 *   float4_e2m1fn of 2 lanes                  QUERN_E2M1X2
 *   device cpu, cuda host                     QUERN_CPU, ordinal 0
 *   device cuda, cuda managed                 QUERN_CUDA and the ordinal
 */
#ifndef QUERN_DLPACK_H
#define QUERN_DLPACK_H

#include <quern/quern.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Fills *tensor from a DLTensor. Strides of NULL mean a contiguous tensor, and so do any of a tensor without
 * elements; byte_offset is added to data. Refused with QUERN_ERR_INVALID_ARGUMENT: NULL, more than
 * QUERN_MAX_DIMS dimensions, a dtype or device that is not in the table. */
QUERN_API quern_status quern_tensor_from_dlpack(const void *dl_tensor, quern_tensor *tensor);

/* Fills the DLTensor from *tensor. Its shape and strides then point into *tensor, which must outlive their
 * use. Refused with QUERN_ERR_INVALID_ARGUMENT: NULL, an unknown dtype or device, ndim outside 0 ...
 * QUERN_MAX_DIMS. */
QUERN_API quern_status quern_tensor_to_dlpack(quern_tensor *tensor, void *dl_tensor);

#ifdef __cplusplus
}
#endif
#endif
