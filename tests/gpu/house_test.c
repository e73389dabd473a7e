/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * house_test.c - the two shared libraries as a program meets them: cuda.h's calls, whole layers on device
 * memory beside the CPU backend, and every documented fault, after each of which the device still computes.
 */
#include "cmocka_c11.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <quern/attention.h>
#include <quern/cuda.h>
#include <quern/nsa.h>
#include <quern/plan.h>

enum { N = 200, H = 4, HKV = 2, D = 32, LAYER = N * H * D, KEYS = N * HKV * D };

static int32_t device; /* whose memory and stream a test uses */
static void *stream;
static quern_context *ctx;

#define OK(call)                                                                                             \
    do {                                                                                                     \
        if ((call) != QUERN_OK) fail_msg("%s: %s", #call, quern_last_error(NULL));                           \
    } while (0)

static uint32_t seed = 1;
static float uniform(void)
{
    seed = seed * 1664525u + 1013904223u;
    return (float)(seed >> 8) / 8388608.0f - 1.0f;
}

/* A tensor twice: in host memory, and in device memory with guards around it. */
typedef struct twin {
    quern_tensor host, device;
    size_t bytes;
    char *base;
} twin;
enum { GUARD = 256, PATTERN = 0x5a };

static twin twin_make(quern_dtype dtype, int32_t ndim, const int64_t *shape, bool random)
{
    twin t;
    size_t n = 1;
    for (int32_t i = 0; i < ndim; i++) n *= (size_t)shape[i];
    t.bytes = n * quern_dtype_size(dtype);
    float *values = calloc(t.bytes + 1, 1);
    assert_non_null(values);
    if (!random) memset(values, 0xfe, t.bytes); /* poison: a huge number, no entry of a list */
    for (size_t i = 0; random && i < n; i++) values[i] = uniform();
    OK(quern_cuda_allocate(device, t.bytes + 2 * GUARD, (void **)&t.base));
    OK(quern_cuda_fill(device, t.base, PATTERN, t.bytes + 2 * GUARD, stream));
    OK(quern_cuda_copy(device, t.base + GUARD, values, t.bytes, stream));
    t.host = t.device = quern_tensor_contiguous(values, dtype, ndim, shape);
    t.device.data = t.base + GUARD;
    t.device.device = QUERN_CUDA;
    t.device.device_id = device;
    return t;
}

/* The device's result beside the host's; the guards. */
static double twin_difference(const twin *t)
{
    unsigned char *all = malloc(t->bytes + 2 * GUARD);
    assert_non_null(all);
    OK(quern_cuda_copy(device, all, t->base, t->bytes + 2 * GUARD, stream));
    OK(quern_cuda_synchronize(device, stream));
    for (size_t i = 0; i < GUARD; i++) assert_true(all[i] == PATTERN && all[GUARD + t->bytes + i] == PATTERN);
    const float *a = t->host.data, *b = (const float *)(const void *)(all + GUARD);
    double worst = 0;
    for (size_t i = 0; i < t->bytes / 4; i++) {
        /* equal bits first: a list's -1 is a NaN as a float */
        const double d = memcmp(&a[i], &b[i], 4) == 0 ? 0 : fabs((double)a[i] - (double)b[i]);
        if (!(d <= worst)) worst = isnan(d) ? INFINITY : d;
    }
    free(all);
    return worst;
}

static void twin_free(twin *t)
{
    free(t->host.data);
    OK(quern_cuda_free(device, t->base));
}

static const int64_t q_shape[] = {1, N, H, D}, k_shape[] = {1, N, HKV, D}, lse_shape[] = {1, H, N},
                     w_shape[] = {H, 3, D}, gate_shape[] = {1, N, H, 3};

static int start(void **unused)
{
    (void)unused;
    if (quern_cuda_stream_create(device, &stream) != QUERN_OK ||
        quern_context_create(NULL, &ctx) != QUERN_OK) {
        printf("%s\n", quern_last_error(NULL));
        return 1;
    }
    return 0;
}

static void the_device_is_described(void **unused)
{
    (void)unused;
    quern_cuda_device info = QUERN_CUDA_DEVICE_INIT;
    int32_t count = 0;
    OK(quern_cuda_device_count(&count));
    assert_true(count >= 1);
    OK(quern_cuda_device_get(device, &info));
    assert_true(info.compute_major >= 8 && info.multiprocessors > 0 && info.memory_bytes > 0 &&
                info.l2_bytes > 0);
    assert_true(info.free_bytes > 0 && info.free_bytes <= info.memory_bytes && strlen(info.name) > 0);
    assert_int_equal(quern_cuda_check(count), QUERN_ERR_DEVICE);
    assert_int_equal(quern_cuda_check(-1), QUERN_ERR_DEVICE);
    assert_non_null(strstr(quern_last_error(NULL), "accepted"));
}

static void attention_forward(twin *t, quern_status expected)
{
    const quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    for (int gpu = expected == QUERN_OK ? 0 : 1; gpu < 2; gpu++) {
        quern_attention_tensors a = QUERN_ATTENTION_TENSORS_INIT;
        const quern_tensor *v[5];
        for (int i = 0; i < 5; i++) v[i] = gpu ? &t[i].device : &t[i].host;
        a.q = v[0];
        a.k = v[1];
        a.v = v[2];
        a.o = v[3];
        a.lse = v[4];
        const quern_exec exec = {sizeof exec, gpu ? stream : NULL, NULL};
        size_t bytes;
        void *workspace = NULL;
        quern_status status = quern_attention_forward_workspace(ctx, &params, &a, &bytes);
        if (status == QUERN_OK && gpu) OK(quern_cuda_allocate(device, bytes, &workspace));
        if (status == QUERN_OK && !gpu) workspace = malloc(bytes + 1);
        if (status == QUERN_OK) status = quern_attention_forward(ctx, &exec, &params, &a, workspace, bytes);
        if (status != (gpu ? expected : QUERN_OK))
            fail_msg("status %d: %s", (int)status, quern_last_error(NULL));
        if (gpu) {
            OK(quern_cuda_synchronize(device, stream));
            OK(quern_cuda_free(device, workspace));
        } else {
            free(workspace);
        }
    }
}

static void attention_make(twin *t)
{
    t[0] = twin_make(QUERN_F32, 4, q_shape, true);
    t[1] = twin_make(QUERN_F32, 4, k_shape, true);
    t[2] = twin_make(QUERN_F32, 4, k_shape, true);
    t[3] = twin_make(QUERN_F32, 4, q_shape, false);
    t[4] = twin_make(QUERN_F32, 3, lse_shape, false);
}

static void dense_attention_agrees_with_the_cpu(void **unused)
{
    (void)unused;
    twin t[5];
    attention_make(t);
    attention_forward(t, QUERN_OK);
    assert_true(twin_difference(&t[3]) < 1e-5 && twin_difference(&t[4]) < 1e-5);
    for (int i = 0; i < 5; i++) twin_free(&t[i]);
}

/* A call with a wrong pointer fails, writes nothing, and the next call works. */
static void pointers_of_another_device_are_refused(void **unused)
{
    (void)unused;
    twin t[5];
    attention_make(t);
    for (int i = 0; i < 5; i++) {
        void *right = t[i].device.data;
        t[i].device.data = t[i].host.data;
        attention_forward(t, QUERN_ERR_INVALID_ARGUMENT);
        assert_non_null(strstr(quern_last_error(NULL), "is host memory"));
        t[i].device.data = right;
    }
    float *o = malloc(LAYER * sizeof *o);
    assert_non_null(o);
    OK(quern_cuda_copy(device, o, t[3].device.data, LAYER * sizeof *o, stream));
    OK(quern_cuda_synchronize(device, stream));
    for (int i = 0; i < LAYER; i++) assert_true(o[i] < -1e30f);
    free(o);
    quern_attention_tensors a =
        QUERN_ATTENTION_TENSORS_INIT; /* device memory that its tensor calls the host's */
    const quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_tensor q = t[0].host;
    q.data = t[0].device.data;
    a.q = &q;
    a.k = &t[1].host;
    a.v = &t[2].host;
    a.o = &t[3].host;
    assert_int_equal(quern_attention_forward(ctx, NULL, &params, &a, NULL, 0), QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "its tensor says cpu"));
    q = t[0].device;
    q.device_id = 63;
    for (int i = 1; i < 5; i++) t[i].device.device_id = 63;
    a.q = &q;
    a.k = &t[1].device;
    a.v = &t[2].device;
    a.o = &t[3].device;
    assert_int_equal(quern_attention_forward(ctx, NULL, &params, &a, NULL, 0), QUERN_ERR_DEVICE);
    for (int i = 1; i < 5; i++) t[i].device.device_id = 0;
    attention_forward(t, QUERN_OK);
    assert_true(twin_difference(&t[3]) < 1e-5);
    for (int i = 0; i < 5; i++) twin_free(&t[i]);
}

static void too_much_memory_is_an_error_and_nothing_else(void **unused)
{
    (void)unused;
    void *p = &p;
    assert_int_equal(quern_cuda_allocate(device, (size_t)1 << 50, &p), QUERN_ERR_OUT_OF_MEMORY);
    assert_ptr_equal(p, &p);
    OK(quern_cuda_synchronize(device, stream));
    dense_attention_agrees_with_the_cpu(NULL);
}

/* Forward and backward of the whole layer, selection included, through the drivers on device memory. */
static void a_whole_layer_agrees_with_the_cpu(void **unused)
{
    (void)unused;
    enum { Q, K, V, W, O, GATES, L0, L1, L2, IDX, DO, DQ, DK, DV, DW, KC, VC, COUNT };
    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    params.block_size = 16;
    params.stride = 16;
    params.select_block = 16;
    params.num_selected = 4;
    params.window = 40;
    params.gate = QUERN_NSA_GATE_WEIGHTS;
    const int64_t rows = (N + params.tile - 1) / params.tile,
                  hs = params.scope == QUERN_NSA_SCOPE_HEAD ? H : HKV;
    const int64_t idx_shape[] = {1, hs, rows, 4}, cmp_shape[] = {1, (N - 16) / 16 + 1, HKV, D};
    twin t[COUNT];
    t[Q] = twin_make(QUERN_F32, 4, q_shape, true);
    t[K] = twin_make(QUERN_F32, 4, k_shape, true);
    t[V] = twin_make(QUERN_F32, 4, k_shape, true);
    t[W] = twin_make(QUERN_F32, 3, w_shape, true);
    t[DO] = twin_make(QUERN_F32, 4, q_shape, true);
    t[O] = twin_make(QUERN_F32, 4, q_shape, false);
    t[GATES] = twin_make(QUERN_F32, 4, gate_shape, false);
    for (int i = L0; i <= L2; i++) t[i] = twin_make(QUERN_F32, 3, lse_shape, false);
    t[IDX] = twin_make(QUERN_I32, 4, idx_shape, false);
    t[DQ] = twin_make(QUERN_F32, 4, q_shape, false);
    t[DK] = twin_make(QUERN_F32, 4, k_shape, false);
    t[DV] = twin_make(QUERN_F32, 4, k_shape, false);
    t[DW] = twin_make(QUERN_F32, 3, w_shape, false);
    t[KC] = twin_make(QUERN_F32, 4, cmp_shape, false);
    t[VC] = twin_make(QUERN_F32, 4, cmp_shape, false);
    for (int gpu = 0; gpu < 2; gpu++) {
        quern_nsa_tensors a = QUERN_NSA_TENSORS_INIT;
        const quern_tensor *v[COUNT];
        for (int i = 0; i < COUNT; i++) v[i] = gpu ? &t[i].device : &t[i].host;
        a.q = v[Q];
        a.k = v[K];
        a.v = v[V];
        a.w_gate = v[W];
        a.o = v[O];
        a.gates = v[GATES];
        a.block_idx = v[IDX];
        a.lse_cmp = v[L0];
        a.lse_slc = v[L1];
        a.lse_win = v[L2];
        a.k_cmp = v[KC];
        a.v_cmp = v[VC];
        const quern_exec exec = {sizeof exec, gpu ? stream : NULL, NULL};
        for (int pass = 0; pass < 2; pass++) {
            if (pass == 1) {
                a.d_o = v[DO];
                a.d_q = v[DQ];
                a.d_k = v[DK];
                a.d_v = v[DV];
                a.d_w_gate = v[DW];
            }
            size_t bytes;
            void *workspace = NULL;
            OK((pass ? quern_nsa_backward_workspace : quern_nsa_forward_workspace)(ctx, &params, &a, &bytes));
            if (gpu) OK(quern_cuda_allocate(device, bytes, &workspace));
            else workspace = malloc(bytes + 1);
            if (gpu && bytes > 0) { /* host memory for the workspace is refused */
                void *host = malloc(bytes);
                assert_int_equal(
                    (pass ? quern_nsa_backward : quern_nsa_forward)(ctx, &exec, &params, &a, host, bytes),
                    QUERN_ERR_INVALID_ARGUMENT);
                free(host);
            }
            OK((pass ? quern_nsa_backward : quern_nsa_forward)(ctx, &exec, &params, &a, workspace, bytes));
            bool done = false;
            if (gpu) {
                while (!done) OK(quern_cuda_query(device, stream, &done));
                OK(quern_cuda_free(device, workspace));
            } else {
                free(workspace);
            }
        }
    }
    assert_true(twin_difference(&t[IDX]) == 0);
    static const int results[] = {O, GATES, L0, L1, L2, DQ, DK, DV, DW, KC, VC};
    for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
        const double d = twin_difference(&t[results[i]]);
        if (!(d < 2e-4)) fail_msg("tensor %d differs by %g", results[i], d);
    }
    for (int i = 0; i < COUNT; i++) twin_free(&t[i]);
}

/* cu_seqlens that the host cannot read are clamped into the tensor and reported; the result is that of the
 * clamped ones. */
static void bad_cu_seqlens_set_the_status(void **unused)
{
    (void)unused;
    static const int32_t cu_seqlens[2][4] = {{0, 120, N + 100, N}, {0, 120, N, N}};
    const int64_t shapes[][3] = {{N, H, D}, {N, HKV, D}, {N, HKV, D}, {N, H, D}, {N, H, D}}, cu_shape[] = {4},
                  one[] = {1};
    quern_nsa_params params = QUERN_NSA_PARAMS_INIT;
    params.block_size = 16;
    params.stride = 16;
    params.select_block = 16;
    params.num_selected = 4;
    params.window = 40;
    twin t[5], cu = twin_make(QUERN_I32, 1, cu_shape, false), status = twin_make(QUERN_I32, 1, one, false);
    for (int i = 0; i < 5; i++) t[i] = twin_make(QUERN_F32, 3, shapes[i], i < 3);
    for (int run = 0; run < 2; run++) {
        quern_nsa_tensors a = QUERN_NSA_TENSORS_INIT;
        a.q = &t[0].device;
        a.k = &t[1].device;
        a.v = &t[2].device;
        a.o = &t[3 + run].device;
        a.cu_seqlens = &cu.device;
        quern_exec exec = {sizeof exec, stream, &status.host};
        size_t bytes;
        void *workspace;
        OK(quern_nsa_forward_workspace(ctx, &params, &a, &bytes));
        OK(quern_cuda_allocate(device, bytes, &workspace));
        OK(quern_cuda_copy(device, cu.device.data, cu_seqlens[run], sizeof cu_seqlens[run], stream));
        OK(quern_cuda_fill(device, status.device.data, 0, 4, stream));
        assert_int_equal(quern_nsa_forward(ctx, &exec, &params, &a, workspace, bytes),
                         QUERN_ERR_INVALID_ARGUMENT); /* a status of the host's */
        exec.status = &status.device;
        OK(quern_nsa_forward(ctx, &exec, &params, &a, workspace, bytes));
        OK(quern_cuda_synchronize(device, stream));
        memset(status.host.data, 0, 4);
        *(int32_t *)status.host.data = run == 0 ? QUERN_STATUS_BAD_OFFSETS : 0;
        assert_true(twin_difference(&status) == 0);
        OK(quern_cuda_free(device, workspace));
    }
    OK(quern_cuda_copy(device, t[3].host.data, t[4].device.data, t[3].bytes, stream));
    OK(quern_cuda_synchronize(device, stream));
    assert_true(twin_difference(&t[3]) == 0);
    for (int i = 0; i < 5; i++) twin_free(&t[i]);
    twin_free(&cu);
    twin_free(&status);
}

/* Dense attention reports offsets, too. */
static void attention_reports_bad_offsets(void **unused)
{
    (void)unused;
    static const int32_t offsets[2][4] = {{0, 120, N + 100, N}, {0, 120, N, N}};
    const int64_t shapes[][3] = {{N, H, D}, {N, HKV, D}, {N, HKV, D}, {N, H, D}}, cu_shape[] = {4},
                  one[] = {1};
    const quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    twin t[4], cu = twin_make(QUERN_I32, 1, cu_shape, false), status = twin_make(QUERN_I32, 1, one, false);
    for (int i = 0; i < 4; i++) t[i] = twin_make(QUERN_F32, 3, shapes[i], i < 3);
    quern_attention_tensors a = QUERN_ATTENTION_TENSORS_INIT;
    a.q = &t[0].device;
    a.k = &t[1].device;
    a.v = &t[2].device;
    a.o = &t[3].device;
    a.cu_seqlens_q = &cu.device;
    const quern_exec exec = {sizeof exec, stream, &status.device};
    for (int run = 0; run < 2; run++) {
        size_t bytes;
        void *workspace;
        OK(quern_attention_forward_workspace(ctx, &params, &a, &bytes));
        OK(quern_cuda_allocate(device, bytes, &workspace));
        OK(quern_cuda_copy(device, cu.device.data, offsets[run], sizeof offsets[run], stream));
        OK(quern_cuda_fill(device, status.device.data, 0, 4, stream));
        OK(quern_attention_forward(ctx, &exec, &params, &a, workspace, bytes));
        OK(quern_cuda_synchronize(device, stream));
        *(int32_t *)status.host.data = run == 0 ? QUERN_STATUS_BAD_OFFSETS : 0;
        assert_true(twin_difference(&status) == 0);
        OK(quern_cuda_free(device, workspace));
    }
    for (int i = 0; i < 4; i++) twin_free(&t[i]);
    twin_free(&cu);
    twin_free(&status);
}

/* A plan's run gives what the call gave; an address that is aligned to less than the plan's is refused. */
static void a_plan_runs_on_device_memory(void **unused)
{
    (void)unused;
    twin t[5];
    attention_make(t);
    attention_forward(t, QUERN_OK);
    const quern_attention_params params = QUERN_ATTENTION_PARAMS_INIT;
    quern_attention_tensors a = QUERN_ATTENTION_TENSORS_INIT;
    a.q = &t[0].device;
    a.k = &t[1].device;
    a.v = &t[2].device;
    a.o = &t[3].device;
    a.lse = &t[4].device;
    quern_plan *plan = NULL;
    size_t bytes = 0;
    void *workspace = NULL;
    void *data[11] = {t[0].device.data, t[1].device.data, t[2].device.data, NULL, NULL,
                      t[3].device.data, t[4].device.data};
    const quern_exec exec = {sizeof exec, stream, NULL};
    OK(quern_plan_create(ctx, QUERN_OP_ATTENTION_FORWARD, &params, &a, &plan));
    OK(quern_plan_workspace(plan, &bytes));
    OK(quern_cuda_allocate(device, bytes, &workspace));
    OK(quern_cuda_fill(device, data[5], 0, t[3].bytes, stream));
    OK(quern_plan_run(plan, &exec, data, workspace, bytes));
    OK(quern_cuda_synchronize(device, stream));
    assert_true(twin_difference(&t[3]) < 1e-5 && twin_difference(&t[4]) < 1e-5);
    data[0] = (char *)data[0] + 4;
    assert_int_equal(quern_plan_run(plan, &exec, data, workspace, bytes), QUERN_ERR_INVALID_ARGUMENT);
    quern_plan_destroy(plan);
    OK(quern_cuda_free(device, workspace));
    for (int i = 0; i < 5; i++) twin_free(&t[i]);
}

static void events_measure_time(void **unused)
{
    (void)unused;
    void *from, *to, *p;
    double ms = -1;
    OK(quern_cuda_allocate(device, (size_t)1 << 28, &p));
    OK(quern_cuda_event_create(device, &from));
    OK(quern_cuda_event_create(device, &to));
    OK(quern_cuda_event_record(device, from, stream));
    OK(quern_cuda_fill(device, p, 1, (size_t)1 << 28, stream));
    OK(quern_cuda_event_record(device, to, stream));
    OK(quern_cuda_event_elapsed(device, from, to, &ms));
    assert_true(ms > 0 && ms < 1000);
    OK(quern_cuda_event_destroy(device, from));
    OK(quern_cuda_event_destroy(device, to));
    OK(quern_cuda_free(device, p));
}

/* Another GPU's memory is refused by its name, and calls on that GPU run there though the thread's current
 * one is cuda:0. */
static void a_second_gpu_is_a_device_of_its_own(void **unused)
{
    (void)unused;
    int32_t count = 0;
    OK(quern_cuda_device_count(&count));
    if (count < 2) skip();
    void *const first = stream;
    twin t[5], other;
    attention_make(t);
    device = 1;
    OK(quern_cuda_stream_create(1, &stream));
    other = twin_make(QUERN_F32, 4, q_shape, true);
    device = 0;
    void *const second = stream;
    void *const right = t[0].device.data;
    stream = first;
    t[0].device.data = other.device.data;
    attention_forward(t, QUERN_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(quern_last_error(NULL), "is memory of cuda:1: memory of cuda:0 is accepted"));
    t[0].device.data = right;
    t[0].device.device_id = 1; /* one tensor's device is not the others' */
    attention_forward(t, QUERN_ERR_INVALID_ARGUMENT);
    t[0].device.device_id = 0;
    attention_forward(t, QUERN_OK);
    assert_true(twin_difference(&t[3]) < 1e-5);
    for (int i = 0; i < 5; i++) twin_free(&t[i]);
    device = 1;
    stream = second;
    dense_attention_agrees_with_the_cpu(NULL);
    a_whole_layer_agrees_with_the_cpu(NULL);
    bad_cu_seqlens_set_the_status(NULL);
    twin_free(&other);
    OK(quern_cuda_stream_destroy(1, stream));
    device = 0;
    stream = first;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_device_is_described),
        cmocka_unit_test(dense_attention_agrees_with_the_cpu),
        cmocka_unit_test(pointers_of_another_device_are_refused),
        cmocka_unit_test(too_much_memory_is_an_error_and_nothing_else),
        cmocka_unit_test(a_whole_layer_agrees_with_the_cpu),
        cmocka_unit_test(bad_cu_seqlens_set_the_status),
        cmocka_unit_test(attention_reports_bad_offsets),
        cmocka_unit_test(a_plan_runs_on_device_memory),
        cmocka_unit_test(events_measure_time),
        cmocka_unit_test(a_second_gpu_is_a_device_of_its_own),
    };
    return cmocka_run_group_tests(tests, start, NULL);
}
