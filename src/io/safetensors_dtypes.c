/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* safetensors_dtypes.c - every dtype of the format. */
#include "io/safetensors.h"

const format_dtype safetensors_dtypes[] = {
    {"F32", 32, QUERN_F32}, {"F16", 16, QUERN_F16}, {"BF16", 16, QUERN_BF16}, {"I32", 32, QUERN_I32},
    {"U8", 8, QUERN_U8},    {"I64", 64, QUERN_I64}, {"F64", 64, -1},          {"BOOL", 8, -1},
    {"I8", 8, -1},          {"I16", 16, -1},        {"U16", 16, -1},          {"U32", 32, -1},
    {"U64", 64, -1},        {"C64", 64, -1},        {"F8_E4M3", 8, -1},       {"F8_E5M2", 8, -1},
    {"F8_E8M0", 8, -1},     {"F6_E2M3", 6, -1},     {"F6_E3M2", 6, -1},       {"F4", 4, -1},
};
const size_t safetensors_dtype_count = sizeof safetensors_dtypes / sizeof *safetensors_dtypes;
