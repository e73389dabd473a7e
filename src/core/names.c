/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* names.c - sizes and names of the public enums. */
#include <quern/cuda.h>

#define TEXT2(x) #x
#define TEXT(x) TEXT2(x)

size_t quern_dtype_size(quern_dtype dtype)
{
    static const size_t sizes[] = {4, 2, 2, 4, 1, 8, 8, 1, 1, 1, 1, 1, 2, 2, 4, 8, 1, 8, 1, 1};
    return (unsigned)dtype < sizeof sizes / sizeof *sizes ? sizes[dtype] : 0;
}

const char *quern_dtype_name(quern_dtype dtype)
{
    static const char *const names[] = {"f32",  "f16",  "bf16", "i32",    "u8",       "i64",     "f64",
                                        "e4m3", "e5m2", "e8m0", "e2m1x2", "i8",       "i16",     "u16",
                                        "u32",  "u64",  "bool", "c64",    "e4m3fnuz", "e5m2fnuz"};
    return (unsigned)dtype < sizeof names / sizeof *names ? names[dtype] : "?";
}

const char *quern_status_name(quern_status status)
{
    static const char *const names[] = {"ok",        "invalid argument", "unsupported",
                                        "workspace", "out of memory",    "input/output",
                                        "format",    "device",           "internal"};
    return (unsigned)status < sizeof names / sizeof *names ? names[status] : "?";
}

const char *quern_cuda_fault_name(int32_t bits)
{
    static const char *const names[] = {
        "an index of a list that is outside its range", "a group of a list that is outside its range",
        "offsets that fall or leave their tensor",      "a position, length or slot outside its table",
        "a page that is not one of the pool's",         "a token's or an expert's number outside its range",
        "a scale byte that is no number of its format", "a global scale that is not finite and above 0",
        "a value to be quantised that is not finite"};
    const int bit = bits != 0 ? __builtin_ctz((unsigned)bits) : -1;
    return bit < 0 ? "" : (size_t)bit < sizeof names / sizeof *names ? names[bit] : "?";
}

const char *quern_version(void)
{
    return TEXT(QUERN_VERSION_MAJOR) "." TEXT(QUERN_VERSION_MINOR) "." TEXT(QUERN_VERSION_PATCH);
}
