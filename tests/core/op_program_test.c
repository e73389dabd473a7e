/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* op_program_test.c - programs: what waits for what where stages may run beside each other, loops whose views
 * move, and what a program refuses. The stages are the CPU's. */
#include "cmocka_c11.h"

#include "context.h"
#include "tensor.h"

#include "core/op.h"
#include "nsa/call.h"

#include <stdlib.h>
#include <string.h>

/* ---- stages beside each other ---- */

enum { STEPS_MOST = OP_BESIDE_MOST + 2 };

/* What each step waited for: bit i of behind[s], of step i; bit 31: of the start. */
static struct {
    bool records;
    int points, steps;
    uint32_t behind[STEPS_MOST];
} seen;

static bool note_point(const stage_exec *exec, backend_point *point)
{
    (void)exec;
    if (!seen.records) return false;
    /* The address of an element tells the point: [0] is the start, [1 + i] follows step i. */
    static char places[3 + STEPS_MOST];
    point->count = 1;
    point->after[0] = &places[seen.points++];
    return true;
}

static quern_status note_resume(const stage_exec *exec, const backend_point *const *points, int32_t count)
{
    (void)exec;
    static const char *first;
    /* The call itself resumes first and last; its first step waits for the start alone. */
    if (seen.steps <= 1) first = points[0]->after[0];
    uint32_t behind = 0;
    for (int32_t i = 0; i < count; i++) {
        const ptrdiff_t at = (const char *)points[i]->after[0] - first;
        behind |= at == 0 ? 1u << 31 : 1u << (at - 1);
    }
    seen.behind[seen.steps++] = behind;
    return QUERN_OK;
}

static void build_beside(op_build *b)
{
    static quern_backend backend; /* must outlive the call */
    backend = *b->call->backend;
    backend.attend_gate_forward = (attend_gate_stage){0};
    backend.point = note_point;
    backend.resume = note_resume;
    b->call->backend = &backend;
    nsa_build_program(b);
}

enum { N = 64, H = 4, HKV = 2, D = 16 };

typedef struct forward {
    quern_nsa_params params;
    test_tensor q, k, v, o, w_gate;
    quern_nsa_tensors tensors;
} forward;

static void forward_make(forward *f, quern_nsa_metric metric)
{
    test_random random = {test_seed("programs", 83)};
    const int64_t q[] = {1, N, H, D}, k[] = {1, N, HKV, D}, w[] = {H, 3, D};
    *f = (forward){.params = QUERN_NSA_PARAMS_INIT, .tensors = QUERN_NSA_TENSORS_INIT};
    f->params.block_size = 8;
    f->params.num_selected = 3;
    f->params.window = 10;
    f->params.metric = metric;
    f->params.gate = QUERN_NSA_GATE_WEIGHTS;
    f->q = test_tensor_make(&random, QUERN_F32, 4, q, TEST_CONTIGUOUS);
    f->k = test_tensor_make(&random, QUERN_F32, 4, k, TEST_CONTIGUOUS);
    f->v = test_tensor_make(&random, QUERN_F32, 4, k, TEST_CONTIGUOUS);
    f->o = test_tensor_make(&random, QUERN_F32, 4, q, TEST_CONTIGUOUS);
    f->w_gate = test_tensor_make(&random, QUERN_F32, 3, w, TEST_CONTIGUOUS);
    test_tensor *const inputs[] = {&f->q, &f->k, &f->v, &f->w_gate};
    for (int i = 0; i < 4; i++) test_tensor_normal(inputs[i], &random, 1);
    f->tensors.q = &f->q.view;
    f->tensors.k = &f->k.view;
    f->tensors.v = &f->v.view;
    f->tensors.o = &f->o.view;
    f->tensors.w_gate = &f->w_gate.view;
}

/* Runs it with stages beside each other; what steps wait for stands in `seen` where a stream is recorded. */
static void forward_run(forward *f, bool records)
{
    op_family family = nsa_family;
    size_t bytes = 0;
    family.build = build_beside;
    memset(&seen, 0, sizeof seen);
    test_tensor_reset(&f->o);
    if (op_workspace_of(&family, NSA_FORWARD, ctx, &f->params, &f->tensors, &bytes) != QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace workspace = test_workspace_make(bytes);
    seen.records = records;
    if (op_run(&family, NSA_FORWARD, ctx, NULL, &f->params, &f->tensors, workspace.data, bytes) !=
        QUERN_OK)
        fail_msg("%s", quern_last_error(ctx));
    test_workspace_close(&workspace);
}

static void forward_free(forward *f)
{
    test_tensor *const all[] = {&f->q, &f->k, &f->v, &f->o, &f->w_gate};
    for (int i = 0; i < 5; i++) test_tensor_free(all[i]);
}

static const uint32_t start = 1u << 31;

/* Runs a forward in both ways, which give the same bits, and compares what each step waited for. */
static void expect_behind(forward *f, const uint32_t *behind, int steps)
{
    forward_run(f, false);
    assert_int_equal(seen.steps, 0);
    test_tensor alone = test_tensor_copy(&f->o);
    forward_run(f, true);
    assert_true(test_tensor_same_bits(&alone, &f->o));
    assert_int_equal(seen.steps, steps + 2);
    for (int i = 0; i < steps; i++)
        if (seen.behind[i + 1] != behind[i])
            fail_msg("step %d waits for %#x: %#x is expected", i, seen.behind[i + 1], behind[i]);
    test_tensor_free(&alone);
    forward_free(f);
}

/* compress, window, compressed, select, selected, gate. What another of the steps waits for is not waited for
 * again; the last one waits for all. */
static void softmax_selects_behind_the_compressed_branch(void **state)
{
    (void)state;
    enum { COMPRESS = 1 << 0, WINDOW = 1 << 1, CMP = 1 << 2, SELECT = 1 << 3, SELECTED = 1 << 4 };
    forward f;
    forward_make(&f, QUERN_NSA_METRIC_SOFTMAX);
    expect_behind(&f, (const uint32_t[]){start, start, COMPRESS, CMP, SELECT, WINDOW | SELECTED}, 6);
}

/* compress, window, select, compressed, selected, gate. */
static void mean_logit_selects_beside_the_compressed_branch(void **state)
{
    (void)state;
    enum { COMPRESS = 1 << 0, WINDOW = 1 << 1, SELECT = 1 << 2, CMP = 1 << 3, SELECTED = 1 << 4 };
    forward f;
    forward_make(&f, QUERN_NSA_METRIC_MEAN_LOGIT);
    const uint32_t behind[] = {start, start, COMPRESS, COMPRESS, SELECT, WINDOW | CMP | SELECTED};
    expect_behind(&f, behind, 6);
}

/* compress, window, select of blocks and groups, compressed, selected, gate. */
static void the_compressed_branch_waits_for_its_groups(void **state)
{
    (void)state;
    enum { COMPRESS = 1 << 0, WINDOW = 1 << 1, SELECT = 1 << 2, CMP = 1 << 3, SELECTED = 1 << 4 };
    forward f;
    forward_make(&f, QUERN_NSA_METRIC_MEAN_LOGIT);
    f.params.max_compressed_groups = 2;
    const uint32_t behind[] = {start, start, COMPRESS, SELECT, SELECT, WINDOW | CMP | SELECTED};
    expect_behind(&f, behind, 6);
}

/* In a short sequence the lists name every block: compress, window, compressed, selected, gate. */
static void what_reads_nothing_made_waits_for_the_start(void **state)
{
    (void)state;
    forward f;
    forward_make(&f, QUERN_NSA_METRIC_SOFTMAX);
    f.params.num_selected = N;
    expect_behind(&f, (const uint32_t[]){start, start, 1 << 0, start, 1 << 1 | 1 << 2 | 1 << 3}, 5);
}

/* ---- a family whose operation copies a tensor ---- */

typedef struct copy_params {
    size_t size;
} copy_params;
typedef struct copy_tensors {
    size_t size;
    const quern_tensor *in, *out;
} copy_tensors;
typedef struct copy_call {
    op_call head;
    copy_params params;
    _Alignas(op_step) char program[2 * OP_STEP_BYTES(permute) + 16 * sizeof(int64_t)];
} copy_call;

static const op_tensor tensors[] = {{"in", "in", OP_F32, OP_NONE, {OP_LEAD}, {0}},
                                    {"out", "out", OP_F32, OP_NONE, {OP_LEAD}, {0}}};
static const copy_params defaults = {sizeof defaults};
static const char *const operations[] = {"copy"};

static quern_status accept(op_call *call)
{
    (void)call;
    return QUERN_OK;
}

static void roles(op_call *call)
{
    call->role[0] = OP_NEEDED;
    call->role[1] = OP_RESULT;
}

static quern_status derive(op_call *call)
{
    call->like = *call->given[0];
    call->lead[0].count = call->like.ndim;
    memcpy(call->lead[0].extent, call->like.shape, sizeof call->like.shape);
    return QUERN_OK;
}

static const op_family copying = {
    .operations = operations,
    .operation_count = 1,
    .tensors = tensors,
    .tensor_count = 2,
    .defaults = &defaults,
    .params_init = "PARAMS_INIT",
    .tensors_init = "TENSORS_INIT",
    .call_size = sizeof(copy_call),
    .params_at = offsetof(copy_call, params),
    .program_at = offsetof(copy_call, program),
    .check_params = accept,
    .roles = roles,
    .derive = derive,
};

enum { A = 2, B = 3, ROWS = 4, COLUMNS = 5 };

/* Copies `in` [A, B, ROWS, COLUMNS] to `out` by a family with this build(). */
static quern_status copy(void (*build)(op_build *), const test_tensor *in, test_tensor *out)
{
    op_family family = copying;
    const copy_tensors t = {sizeof t, &in->view, &out->view};
    static _Alignas(64) char workspace[4096];
    family.build = build;
    return op_run(&family, 0, ctx, NULL, &defaults, &t, workspace, sizeof workspace);
}

/* The last two dimensions at index 0 of the others. */
static quern_tensor matrix_of(op_build *b, int32_t tensor)
{
    quern_tensor t = op_view(b->call, tensor, false);
    t.ndim = 2;
    for (int d = 0; d < 2; d++) {
        t.shape[d] = t.shape[d + 2];
        t.strides[d] = t.strides[d + 2];
    }
    return t;
}

/* A loop over two extents, through a matrix in the workspace that all indices share. */
static void build_loop(op_build *b)
{
    const quern_tensor in = op_view(b->call, 0, false), out = op_view(b->call, 1, false),
                       between = op_matrix(b, QUERN_F32, in.shape[2], in.shape[3]);
    op_loop_begin(b, 2, in.shape);
    permute_args *take = OP_ADD(b, permute);
    *take = (permute_args){.per = 1, .x = matrix_of(b, 0), .out = between};
    for (int32_t d = 0; d < 2; d++) op_moves(b, &take->x, d, in.strides[d]);
    permute_args *give = OP_ADD(b, permute);
    *give = (permute_args){.per = 1, .x = between, .out = matrix_of(b, 1)};
    for (int32_t d = 0; d < 2; d++) op_moves(b, &give->out, d, out.strides[d]);
    op_loop_end(b);
}

/* Parts along the third dimension, one by one. */
static void build_parts(op_build *b)
{
    const int64_t parts = 2;
    op_loop_begin(b, 1, &parts);
    permute_args *args = OP_ADD(b, permute);
    *args = (permute_args){.per = 1, .x = op_view(b->call, 0, false), .out = op_view(b->call, 1, false)};
    op_cut(b, &args->x, 2);
    op_cut(b, &args->out, 2);
    assert_int_equal(args->x.shape[2], ROWS / parts);
    op_loop_end(b);
}

static void build_too_much(op_build *b)
{
    for (int i = 0; i < 4; i++) build_parts(b);
}

static void check_copies(void (*build)(op_build *), test_layout layout)
{
    test_random random = {test_seed("loops", 84)};
    const int64_t shape[] = {A, B, ROWS, COLUMNS};
    test_tensor in = test_tensor_make(&random, QUERN_F32, 4, shape, layout),
                out = test_tensor_make(&random, QUERN_F32, 4, shape, layout);
    test_tensor_normal(&in, &random, 1);
    if (copy(build, &in, &out) != QUERN_OK) fail_msg("%s", quern_last_error(ctx));
    assert_true(test_tensor_same_bits(&in, &out));
    test_tensor_check_guards(&out, "out");
    test_tensor_free(&in);
    test_tensor_free(&out);
}

static void views_move_with_a_loop(void **state)
{
    (void)state;
    for (int layout = 0; layout < TEST_LAYOUTS; layout++) {
        check_copies(build_loop, (test_layout)layout);
        if (layout == TEST_CONTIGUOUS) check_copies(build_parts, (test_layout)layout);
    }
}

static void a_program_without_room_is_refused(void **state)
{
    (void)state;
    test_random random = {test_seed("room", 85)};
    const int64_t shape[] = {A, B, ROWS, COLUMNS};
    test_tensor in = test_tensor_make(&random, QUERN_F32, 4, shape, TEST_CONTIGUOUS),
                out = test_tensor_make(&random, QUERN_F32, 4, shape, TEST_CONTIGUOUS);
    assert_int_equal(copy(build_too_much, &in, &out), QUERN_ERR_INTERNAL);
    assert_non_null(strstr(quern_last_error(ctx), "copy takes more steps than there is room for"));
    test_tensor_check_unchanged(&out, "out");
    test_tensor_free(&in);
    test_tensor_free(&out);
}

static void build_without_stage(op_build *b)
{
    static quern_backend backend;
    backend = *b->call->backend;
    backend.permute = (permute_stage){0};
    b->call->backend = &backend;
    build_parts(b);
}

static void a_stage_that_a_backend_lacks_is_named(void **state)
{
    (void)state;
    test_random random = {test_seed("stages", 86)};
    const int64_t shape[] = {A, B, ROWS, COLUMNS};
    test_tensor in = test_tensor_make(&random, QUERN_F32, 4, shape, TEST_CONTIGUOUS),
                out = test_tensor_make(&random, QUERN_F32, 4, shape, TEST_CONTIGUOUS);
    assert_int_equal(copy(build_without_stage, &in, &out), QUERN_ERR_UNSUPPORTED);
    assert_string_equal(quern_last_error(ctx), "the cpu backend has no stage permute: the cpu has all");
    test_tensor_check_unchanged(&out, "out");
    test_tensor_free(&in);
    test_tensor_free(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(softmax_selects_behind_the_compressed_branch),
        cmocka_unit_test(mean_logit_selects_beside_the_compressed_branch),
        cmocka_unit_test(the_compressed_branch_waits_for_its_groups),
        cmocka_unit_test(what_reads_nothing_made_waits_for_the_start),
        cmocka_unit_test(views_move_with_a_loop),
        cmocka_unit_test(a_program_without_room_is_refused),
        cmocka_unit_test(a_stage_that_a_backend_lacks_is_named),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}
