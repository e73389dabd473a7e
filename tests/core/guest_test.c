/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * guest_test.c - the library in somebody else's process: the caller's threads, its floating-point state, its
 * forks and its limits. Whatever these are, the bits are those of one thread in a process that has touched
 * none of them.
 */
#include "cmocka_c11.h"
#include "float_states.h"
#include "nsa_random.h"

#include <quern/attention.h>

#include <limits.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

/* ---- calls to compare: NSA forward and backward, with oneDNN's products and with means ---- */

enum { CASES = 4 };

static nsa_case *make_case(int which)
{
    nsa_config config = nsa_config_small();
    test_random random = {(uint64_t)which + 5};
    config.dtype = (quern_dtype)(which % 3);
    config.params.gate = QUERN_NSA_GATE_WEIGHTS;
    config.n = 190;
    config.d = config.dv = 24; /* 1 / sqrt(24) is rounded */
    if (which == 3) {          /* 256 entries of one product: what oneDNN takes */
        config.params.compress = QUERN_NSA_COMPRESS_LINEAR;
        config.dtype = QUERN_F32;
        config.params.stride = 2;
        config.n = 600;
        config.h = config.hkv = 1;
        config.d = config.dv = 64;
    }
    return nsa_case_new(&config, &random);
}

static void run_case(nsa_case *c, quern_context *ctx)
{
    nsa_run(c, ctx, nsa_call_forward, nsa_forward_inputs(c), nsa_forward_outputs(c));
    nsa_run(c, ctx, nsa_call_backward, nsa_backward_inputs(c), nsa_backward_outputs(c));
}

static quern_context *context_with(quern_parallel_for *parallel_for, void *arg, int32_t threads)
{
    quern_context_params params = QUERN_CONTEXT_PARAMS_INIT;
    quern_context *ctx;
    params.threads = threads;
    params.parallel_for = parallel_for;
    params.parallel_for_arg = arg;
    if (quern_context_create(&params, &ctx) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    return ctx;
}

/* Runs a case once more with ctx: every result has the bits of `expected`. */
static void check_case(nsa_case *c, quern_context *ctx, const test_tensor expected[NSA_SLOTS],
                       const char *what)
{
    run_case(c, ctx);
    nsa_check_same_bits(c, nsa_forward_outputs(c) | nsa_backward_outputs(c), expected, what);
}

static void expect(nsa_case *c, test_tensor expected[NSA_SLOTS])
{
    quern_context *ctx = context_with(NULL, NULL, 1);
    run_case(c, ctx);
    nsa_copy(c, nsa_forward_outputs(c) | nsa_backward_outputs(c), expected);
    quern_context_destroy(ctx);
}

/* ---- executors ---- */

typedef void executor_body(void *arg, int64_t index, int32_t thread);

typedef struct executor_log {
    int64_t loops, most_threads;
} executor_log;

static void note(void *arg, int32_t threads, int64_t count)
{
    executor_log *log = arg;
    log->loops++;
    if (threads > log->most_threads) log->most_threads = threads;
    assert_true(threads >= 1 && count >= 1 && threads <= count);
}

static void backwards(void *arg, int32_t threads, int64_t count, executor_body *body, void *body_arg)
{
    note(arg, threads, count);
    for (int64_t i = count - 1; i >= 0; i--) body(body_arg, i, (int32_t)(i % threads));
}

/* A share of the indices for each thread, the last ones for the first. */
typedef struct share {
    executor_body *body;
    void *arg;
    int64_t from, to;
    int32_t thread;
} share;

static void *run_share(void *arg)
{
    const share *s = arg;
#if defined(__SSE2__)
    const unsigned odd = 0xffc0; /* flush to zero, subnormals are zero, round to zero */
    _mm_setcsr(odd);
#endif
    for (int64_t i = s->from; i < s->to; i++) s->body(s->arg, i, s->thread);
#if defined(__SSE2__)
    if ((_mm_getcsr() & ~0x3fu) != odd) return arg;
#endif
    return NULL;
}

static void shares(void *arg, int32_t threads, int64_t count, executor_body *body, void *body_arg)
{
    enum { MOST = 8 };
    pthread_t made[MOST];
    share all[MOST];
    note(arg, threads, count);
    for (int32_t t = 0; t < threads; t++) {
        all[t] = (share){body, body_arg, count - count * (t + 1) / threads, count - count * t / threads, t};
        if (pthread_create(&made[t], NULL, run_share, &all[t]) != 0) fail_msg("no thread for the test");
    }
    for (int32_t t = 0; t < threads; t++) {
        void *changed;
        pthread_join(made[t], &changed);
        assert_null(changed);
    }
}

/* Skips some indices, calls others twice, and passes thread numbers out of range; the result must be the
 * same. */
static void careless(void *arg, int32_t threads, int64_t count, executor_body *body, void *body_arg)
{
    note(arg, threads, count);
    for (int64_t i = 0; i < count; i += 2) {
        body(body_arg, i, 0);
        body(body_arg, i, threads);
        body(body_arg, i, -1);
        body(body_arg, i, 0);
    }
}

static int threads_of_process(void)
{
    char line[200];
    int threads = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) sscanf(line, "Threads: %d", &threads);
    if (file != NULL) fclose(file);
    return threads;
}

static void the_callers_executor_runs_everything(void **state)
{
    static const struct {
        const char *name;
        quern_parallel_for *run;
    } executors[] = {{"backwards", backwards}, {"shares", shares}, {"careless", careless}};
    uint64_t index = 0;
    (void)state;
    for (int which = 0; which < CASES; which++) {
        nsa_case *c = make_case(which);
        test_tensor expected[NSA_SLOTS];
        expect(c, expected);
        const int threads_before = threads_of_process();
        for (size_t e = 0; e < sizeof executors / sizeof *executors; e++)
            for (int32_t threads = 1; threads <= 3; threads++) {
                if (!test_in_share(index++)) continue;
                executor_log log = {0, 0};
                quern_context *ctx = context_with(executors[e].run, &log, threads);
                check_case(c, ctx, expected, executors[e].name);
                quern_context_destroy(ctx);
                if (threads > 1) assert_true(log.loops > 5);
                if (threads > 1) assert_int_equal(log.most_threads, threads);
            }
        assert_int_equal(threads_of_process(), threads_before); /* neither OpenMP's nor oneDNN's own */
        nsa_free_copies(expected);
        nsa_case_free(c);
    }
}

/* ---- the floating-point state ---- */

/* One pass of a case. */
typedef struct pass {
    nsa_case *c;
    quern_context *ctx;
    nsa_call call;
    nsa_set set;
    quern_status status;
} pass;

static void run_pass(void *arg)
{
    pass *p = arg;
    p->status = nsa_try(p->c, p->ctx, p->call, p->set);
}

static void the_floating_point_state_is_the_callers(void **state)
{
    uint64_t index = 0;
    (void)state;
    for (int which = 0; which < CASES; which++) {
        nsa_case *c = make_case(which);
        test_tensor expected[NSA_SLOTS];
        test_float_scale(&c->tensor[NSA_V]);
        test_float_scale(&c->tensor[NSA_D_O]);
        expect(c, expected);
        for (int s = 0; s < test_float_states(); s++)
            for (int32_t threads = 1; threads <= 3; threads++) {
                if (!test_in_share(index++)) continue;
                quern_context *ctx = context_with(NULL, NULL, threads);
                pass passes[] = {
                    {c, ctx, nsa_call_forward, nsa_forward_inputs(c) | nsa_forward_outputs(c), QUERN_OK},
                    {c, ctx, nsa_call_backward, nsa_backward_inputs(c) | nsa_backward_outputs(c), QUERN_OK}};
                for (int i = 0; i < 2; i++) {
                    test_float_state_run(s, run_pass, &passes[i]);
                    assert_int_equal(passes[i].status, QUERN_OK);
                }
                nsa_check_same_bits(c, nsa_forward_outputs(c) | nsa_backward_outputs(c), expected,
                                    test_float_state_name(s));
                quern_context_destroy(ctx);
            }
        nsa_free_copies(expected);
        nsa_case_free(c);
    }
}

/* ---- processes ---- */

/* Runs this program again with an argument, in a process that has computed nothing yet; fails unless it exits
 * with 0. */
static void run_self(const char *what)
{
    char self[4096];
    const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n < 0) fail_msg("no /proc/self/exe");
    self[n] = '\0';
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        execl(self, self, what, (char *)NULL);
        _exit(99);
    }
    int status = 1;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fail_msg("%s: %s %d", what, WIFEXITED(status) ? "exit status" : "signal",
                 WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
}

/* A child computes with what its parent made, and with a context of its own. */
static int compute_in_child(quern_context *of_parent)
{
    nsa_case *c = make_case(0);
    test_tensor expected[NSA_SLOTS];
    expect(c, expected);
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        executor_log log = {0, 0};
        quern_context *own[] = {context_with(NULL, NULL, 3), context_with(shares, &log, 3)};
        check_case(c, of_parent, expected, "the parent's context");
        for (int i = 0; i < 2; i++) check_case(c, own[i], expected, "the child's own");
        _exit(log.loops > 0 ? 0 : 2);
    }
    int status = 1;
    waitpid(child, &status, 0);
    nsa_free_copies(expected);
    nsa_case_free(c);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

/* The program used OpenMP itself, the library had not computed yet. */
static int fork_after_openmp(void)
{
    int sum = 0;
#pragma omp parallel for num_threads(3) reduction(+ : sum)
    for (int i = 0; i < 100; i++) sum += i;
    quern_context *ctx = context_with(NULL, NULL, 3);
    const int result = sum == 4950 ? compute_in_child(ctx) : 3;
    quern_context_destroy(ctx);
    return result;
}

static int fork_after_computing(void)
{
    nsa_case *c = make_case(1);
    quern_context *ctx = context_with(NULL, NULL, 3);
    run_case(c, ctx);
    const int result = compute_in_child(ctx);
    quern_context_destroy(ctx);
    nsa_case_free(c);
    return result;
}

/* The executor's threads stayed with the parent: the child must not wait for them. */
static void lost(void *arg, int32_t threads, int64_t count, executor_body *body, void *body_arg)
{
    if (getpid() != *(pid_t *)arg) pause();
    for (int64_t i = 0; i < count; i++) body(body_arg, i, (int32_t)(i % threads));
}

static int fork_with_an_executor(void)
{
    pid_t self = getpid();
    quern_context *ctx = context_with(lost, &self, 3);
    const int result = compute_in_child(ctx);
    quern_context_destroy(ctx);
    return result;
}

/* Limits address space to what the call took on one thread and `spare` bytes more; each thread's stack takes
 * 8 MiB. */
static int few_threads(int64_t spare)
{
    nsa_case *c = make_case(2);
    test_tensor expected[NSA_SLOTS];
    executor_log log = {0, 0};
    mallopt(M_MMAP_MAX, 0); /* freed workspaces are not returned to the system */
    mallopt(M_TRIM_THRESHOLD, INT_MAX);
    void *volatile room = malloc((size_t)64 << 20); /* the limit leaves the test's own blocks this much */
    free(room);
    quern_context *serial = context_with(backwards, &log, 8), *ctx = context_with(NULL, NULL, 8);
    expect(c, expected);
    check_case(c, serial, expected, "one thread");
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%ld", &pages) != 1) return 3;
    fclose(file);
    const rlim_t bytes = (rlim_t)(pages * sysconf(_SC_PAGESIZE) + spare);
    if (setrlimit(RLIMIT_AS, &(struct rlimit){bytes, bytes}) != 0) return 4;
    check_case(c, ctx, expected, "few threads");
    check_case(c, ctx, expected, "few threads again");
    quern_context_destroy(ctx);
    quern_context_destroy(serial);
    nsa_free_copies(expected);
    nsa_case_free(c);
    return 0;
}

static int run_mode(const char *mode)
{
    if (strcmp(mode, "fork_after_openmp") == 0) return fork_after_openmp();
    if (strcmp(mode, "fork_after_computing") == 0) return fork_after_computing();
    if (strcmp(mode, "fork_with_an_executor") == 0) return fork_with_an_executor();
    if (strcmp(mode, "no_thread") == 0) return few_threads((int64_t)4 << 20);
    if (strcmp(mode, "few_threads") == 0) return few_threads((int64_t)40 << 20);
    return 98;
}

static void a_child_of_fork_computes(void **state)
{
    (void)state;
    run_self("fork_after_openmp");
    run_self("fork_after_computing");
    run_self("fork_with_an_executor");
}

static void threads_that_cannot_be_created_are_done_without(void **state)
{
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* the sanitizer's own memory takes terabytes of address space */
#endif
    run_self("no_thread");
    run_self("few_threads");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_child_of_fork_computes),
        cmocka_unit_test(threads_that_cannot_be_created_are_done_without),
        cmocka_unit_test(the_callers_executor_runs_everything),
        cmocka_unit_test(the_floating_point_state_is_the_callers),
    };
    if (argc == 2) return run_mode(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
