/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* safetensors_dtypes.c - every dtype of the format. */
#include "io/safetensors.h"

const format_dtype safetensors_dtypes[] = {
    {"F32", 32, QUERN_F32},
    {"F16", 16, QUERN_F16},
    {"BF16", 16, QUERN_BF16},
    {"F64", 64, QUERN_F64},
    {"F8_E4M3", 8, QUERN_E4M3},
    {"F8_E5M2", 8, QUERN_E5M2},
    {"F8_E8M0", 8, QUERN_E8M0},
    {"F4", 4, QUERN_E2M1X2},
    {"I64", 64, QUERN_I64},
    {"I32", 32, QUERN_I32},
    {"I16", 16, QUERN_I16},
    {"I8", 8, QUERN_I8},
    {"U64", 64, QUERN_U64},
    {"U32", 32, QUERN_U32},
    {"U16", 16, QUERN_U16},
    {"U8", 8, QUERN_U8},
    {"BOOL", 8, QUERN_BOOL},
    {"C64", 64, QUERN_C64},
    {"F8_E4M3FNUZ", 8, QUERN_E4M3FNUZ},
    {"F8_E5M2FNUZ", 8, QUERN_E5M2FNUZ},
    {"F6_E2M3", 6, -1},
    {"F6_E3M2", 6, -1},
};
const size_t safetensors_dtype_count = sizeof safetensors_dtypes / sizeof *safetensors_dtypes;
