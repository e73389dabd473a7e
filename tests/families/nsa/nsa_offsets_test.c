/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* nsa_offsets_test.c - element offsets above 2^31 and 2^32: the same problem in compact tensors and in
 * tensors whose token or head stride is huge, over mappings that reserve no memory, gives the same bits. */
#include "cmocka_c11.h"
#include "nsa_case.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Byte extent of a view whose dimension `dim` got the stride `stride`. */
static size_t extent(const quern_tensor *v)
{
    int64_t last = 0;
    for (int32_t i = 0; i < v->ndim; i++)
        if (v->shape[i] > 0) last += (v->shape[i] - 1) * v->strides[i];
    return (size_t)(last + 1) * quern_dtype_size(v->dtype);
}

/* Moves every tensor of the case into a mapping with a huge stride along `dim`; returns false if this
 * machine refuses such mappings. */
static bool spread(nsa_case *c, int32_t dim, int64_t stride, void *maps[NSA_SLOTS], size_t sizes[NSA_SLOTS])
{
    for (int i = 0; i < NSA_SLOTS; i++) {
        test_tensor *t = &c->tensor[i];
        if (t->buffer == NULL || t->view.ndim < 3) continue;
        const bool list = t->view.dtype == QUERN_I32;
        double *values = list ? NULL : test_tensor_get(t);
        int32_t *ints = list ? test_tensor_get_i32(t) : NULL;
        t->view = quern_tensor_contiguous(NULL, t->view.dtype, t->view.ndim, t->view.shape);
        const int32_t along = dim < t->view.ndim - 1 ? dim : 0;
        t->view.strides[along] = stride;
        for (int32_t d = 0; d < along; d++) /* outer dimensions step over the whole spread one */
            t->view.strides[d] = stride * t->view.shape[along];
        sizes[i] = extent(&t->view);
        maps[i] =
            mmap(NULL, sizes[i], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (maps[i] == MAP_FAILED) {
            maps[i] = NULL;
            free(values);
            free(ints);
            return false;
        }
        t->view.data = maps[i];
        const size_t bytes = t->bytes;
        t->bytes = 0; /* the snapshot is of the small buffer, no longer of this tensor */
        if (list) test_tensor_set_i32(t, ints);
        else test_tensor_set(t, values);
        t->bytes = bytes;
        free(values);
        free(ints);
    }
    return true;
}

static void compare_with_compact(int32_t dim, int64_t stride, bool varlen, quern_dtype dtype)
{
    nsa_config config = nsa_config_small();
    test_random random = {5};
    config.dtype = dtype;
    config.varlen = varlen;
    config.batch = varlen ? 2 : 1;
    config.n = 60;
    config.lens[0] = 33;
    config.lens[1] = 27;
    config.params.gate = QUERN_NSA_GATE_WEIGHTS;
    config.params.compress = QUERN_NSA_COMPRESS_MEAN;
    config.project_k = true;
    nsa_case *compact = nsa_case_new(&config, &random);
    random.state = 5;
    nsa_case *huge = nsa_case_new(&config, &random);
    void *maps[NSA_SLOTS] = {NULL};
    size_t sizes[NSA_SLOTS];
    quern_context *ctx = test_context(QUERN_CPU_LEVEL_AUTO, 2);
    const bool mapped = spread(huge, dim, stride, maps, sizes);
    if (mapped) {
        const nsa_set forward = nsa_forward_outputs(compact), backward = nsa_backward_outputs(compact);
        nsa_run(compact, ctx, nsa_call_forward, nsa_forward_inputs(compact), forward);
        nsa_run(compact, ctx, nsa_call_backward, nsa_backward_inputs(compact), backward);
        if (nsa_try(huge, ctx, nsa_call_forward, nsa_forward_inputs(huge) | forward) != QUERN_OK ||
            nsa_try(huge, ctx, nsa_call_backward, nsa_backward_inputs(huge) | backward) != QUERN_OK)
            fail_msg("%s", quern_last_error(ctx));
        for (int i = 0; i < NSA_SLOTS; i++)
            if (((forward | backward) & NSA_BIT(i)) &&
                !test_tensor_same_bits(&compact->tensor[i], &huge->tensor[i]))
                fail_msg("%s differs with stride %lld along dimension %d", nsa_slot_name(i),
                         (long long)stride, dim);
    }
    for (int i = 0; i < NSA_SLOTS; i++)
        if (maps[i] != NULL) munmap(maps[i], sizes[i]);
    quern_context_destroy(ctx);
    nsa_case_free(compact);
    nsa_case_free(huge);
    if (!mapped) {
        print_message("this machine refuses mappings without reserve\n");
        skip();
    }
}

static void token_stride_beyond_32_bits(void **state)
{
    (void)state;
    compare_with_compact(1, ((int64_t)1 << 27) + 8, false, QUERN_F32); /* 60 tokens: 2^33 elements */
    compare_with_compact(0, ((int64_t)1 << 27) + 8, true, QUERN_BF16);
}

static void head_stride_beyond_32_bits(void **state)
{
    (void)state;
    compare_with_compact(2, ((int64_t)1 << 31) + 8, false, QUERN_F32);
}

static void batch_stride_beyond_32_bits(void **state)
{
    (void)state;
    compare_with_compact(0, ((int64_t)1 << 33) + 8, false, QUERN_F32);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(token_stride_beyond_32_bits),
        cmocka_unit_test(head_stride_beyond_32_bits),
        cmocka_unit_test(batch_stride_beyond_32_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
