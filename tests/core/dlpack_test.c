/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* dlpack_test.c - views to and from DLPack's tensors. The test uses DLPack's own header where it is
 * installed, else the same layout declared below. */
#include "cmocka_c11.h"

#include <stddef.h>
#include <string.h>

#include <quern/dlpack.h>

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#else
typedef struct {
    int32_t device_type; /* an enum there */
    int32_t device_id;
} DLDevice;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;
#endif

static void never(DLManagedTensor *self)
{
    (void)self;
    fail_msg("the deleter was called");
}

static void a_managed_tensor_becomes_a_view(void **unused)
{
    (void)unused;
    float memory[4 + 2 * 3 * 8];
    int64_t shape[] = {2, 3, 8}, strides[] = {8, 16, 1};
    DLManagedTensor m = {
        .dl_tensor = {.data = memory, .ndim = 3, .shape = shape, .strides = strides, .byte_offset = 16},
        .deleter = never};
    m.dl_tensor.device.device_type = 1;
    m.dl_tensor.dtype = (DLDataType){2, 32, 1};
    quern_tensor t;
    assert_int_equal(quern_tensor_from_dlpack(&m.dl_tensor, &t), QUERN_OK);
    assert_ptr_equal(t.data, memory + 4);
    assert_int_equal(t.dtype, QUERN_F32);
    assert_int_equal(t.device, QUERN_CPU);
    assert_int_equal(t.ndim, 3);
    assert_memory_equal(t.shape, shape, sizeof shape);
    assert_memory_equal(t.strides, strides, sizeof strides);
    m.dl_tensor.strides = NULL; /* contiguous */
    m.dl_tensor.device.device_type = 13;
    m.dl_tensor.device.device_id = 2;
    assert_int_equal(quern_tensor_from_dlpack(&m.dl_tensor, &t), QUERN_OK);
    assert_int_equal(t.device, QUERN_CUDA);
    assert_int_equal(t.device_id, 2);
    const int64_t contiguous[] = {24, 8, 1};
    assert_memory_equal(t.strides, contiguous, sizeof contiguous);
    int64_t none[] = {0, 0, 0}; /* NumPy's strides of an array without elements */
    m.dl_tensor.strides = none;
    assert_int_equal(quern_tensor_from_dlpack(&m.dl_tensor, &t), QUERN_OK);
    assert_memory_equal(t.strides, none, sizeof none);
    shape[0] = 0;
    assert_int_equal(quern_tensor_from_dlpack(&m.dl_tensor, &t), QUERN_OK);
    assert_memory_equal(t.strides, contiguous, sizeof contiguous);
}

static void every_dtype_goes_there_and_back(void **unused)
{
    (void)unused;
    static const struct {
        quern_dtype dtype;
        int code, bits, lanes;
    } all[] = {{QUERN_F32, 2, 32, 1},      {QUERN_F16, 2, 16, 1},     {QUERN_BF16, 4, 16, 1},
               {QUERN_F64, 2, 64, 1},      {QUERN_I8, 0, 8, 1},       {QUERN_I16, 0, 16, 1},
               {QUERN_I32, 0, 32, 1},      {QUERN_I64, 0, 64, 1},     {QUERN_U8, 1, 8, 1},
               {QUERN_U16, 1, 16, 1},      {QUERN_U32, 1, 32, 1},     {QUERN_U64, 1, 64, 1},
               {QUERN_BOOL, 6, 8, 1},      {QUERN_C64, 5, 64, 1},     {QUERN_E4M3, 10, 8, 1},
               {QUERN_E5M2, 12, 8, 1},     {QUERN_E8M0, 14, 8, 1},    {QUERN_E2M1X2, 17, 4, 2},
               {QUERN_E4M3FNUZ, 11, 8, 1}, {QUERN_E5M2FNUZ, 13, 8, 1}};
    int64_t bytes[2];
    int seen = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        quern_tensor t = quern_tensor_contiguous(bytes, all[i].dtype, 2, (int64_t[]){1, 2}), back;
        DLTensor d;
        memset(&d, 0x5a, sizeof d);
        assert_int_equal(quern_tensor_to_dlpack(&t, &d), QUERN_OK);
        assert_true(d.dtype.code == all[i].code && d.dtype.bits == all[i].bits &&
                    d.dtype.lanes == all[i].lanes);
        assert_true(d.data == bytes && d.ndim == 2 && d.shape == t.shape && d.strides == t.strides &&
                    d.byte_offset == 0);
        assert_true(d.device.device_type == 1 && d.device.device_id == 0);
        assert_int_equal((size_t)(d.dtype.bits * d.dtype.lanes + 7) / 8, quern_dtype_size(t.dtype));
        assert_int_equal(quern_tensor_from_dlpack(&d, &back), QUERN_OK);
        assert_memory_equal(&back, &t, sizeof t);
        seen++;
    }
    if (quern_dtype_size((quern_dtype)seen) > 0)
        fail_msg("dtype %s has no row here", quern_dtype_name((quern_dtype)seen));
}

static void what_has_no_counterpart_is_named(void **unused)
{
    (void)unused;
    int64_t shape[7] = {1, 1, 1, 1, 1, 1, 1};
    DLTensor d = {.ndim = 1, .shape = shape};
    quern_tensor t = {.ndim = 99};
    d.device.device_type = 1;
    d.dtype = (DLDataType){2, 32, 4};
    assert_int_equal(quern_tensor_from_dlpack(&d, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "code 2, 32 bits, 4 lanes"));
    d.dtype.lanes = 1;
    d.device.device_type = 10;
    assert_int_equal(quern_tensor_from_dlpack(&d, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "device type is 10"));
    d.device.device_type = 1;
    d.ndim = 7;
    assert_int_equal(quern_tensor_from_dlpack(&d, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "7 dimensions"));
    d.ndim = 1;
    d.shape = NULL;
    assert_int_equal(quern_tensor_from_dlpack(&d, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_tensor_from_dlpack(NULL, &t), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_tensor_from_dlpack(&d, NULL), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(t.ndim, 99);
    assert_int_equal(quern_tensor_to_dlpack(&t, &d), QUERN_ERR_INVALID_ARGUMENT);
    t = (quern_tensor){.dtype = (quern_dtype)77};
    assert_int_equal(quern_tensor_to_dlpack(&t, &d), QUERN_ERR_INVALID_ARGUMENT);
    t = (quern_tensor){.device = (quern_device)5};
    assert_int_equal(quern_tensor_to_dlpack(&t, &d), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_tensor_to_dlpack(NULL, &d), QUERN_ERR_INVALID_ARGUMENT);
    assert_int_equal(quern_tensor_to_dlpack(&t, NULL), QUERN_ERR_INVALID_ARGUMENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_managed_tensor_becomes_a_view),
        cmocka_unit_test(every_dtype_goes_there_and_back),
        cmocka_unit_test(what_has_no_counterpart_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
