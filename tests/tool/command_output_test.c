/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/*
 * command_output_test.c - where the command's results go, what its comparison finds, and that a signal, a
 * full disk, a strange name or a huge number ends it with an exit code and a sentence.
 */
#include "command.h"
#include "random.h"

#include <quern/safetensors.h>

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define ATTENTION "attention --n 64 --heads 2/1 --dim 16 --threads 1 --reps 1 --no-peer "

static size_t read_text(const char *name, char *text, size_t room)
{
    FILE *f = fopen(path_of(name), "rb");
    if (f == NULL) fail_msg("%s is missing", name);
    const size_t n = fread(text, 1, room - 1, f);
    text[n] = '\0';
    fclose(f);
    return n;
}

static void a_full_standard_output_is_an_error(void **state)
{
    static const char *const commands[] = {
        "info >/dev/full;",
        "info --json >/dev/full;",
        "--help >/dev/full;",
        "--version >/dev/full;",
        "run --list >/dev/full;",
        "bench --help >/dev/full;",
        "compare $VECTORS/nsa_small.safetensors $VECTORS/nsa_small.safetensors >/dev/full;",
        "bench " ATTENTION " >/dev/full;",
        "probe attention --dry-run --json >/dev/full;"};
    (void)state;
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "%s exit $? #", commands[i]);
        if (run_with("exec 2>&1;", arguments) != 3 ||
            strstr(output, "cannot write to standard output: No space left on device") == NULL)
            fail_msg("quern %s: no error but: %s", commands[i], output);
    }
}

/* Nor does it leave a file: what says that a command failed must not stand beside a result. */
static void without_a_standard_output_no_result_is_written(void **state)
{
    static const char *const streams[] = {">/dev/full", ">&-", ">&- <&- 2>&-"};
    static const char *const commands[] = {
        "run nsa $VECTORS/nsa_small.safetensors $DIR/o.st --block-size 32 --stride 32 --json",
        "bench " ATTENTION "--json $DIR/o.st"};
    (void)state;
    for (size_t i = 0; i < 6; i++) {
        char arguments[256];
        snprintf(arguments, sizeof arguments, "%s %s; exit $? #", commands[i % 2], streams[i / 2]);
        const int code = run(arguments);
        if (code != 3 || exists("o.st"))
            fail_msg("quern %s: exit code %d%s", arguments, code, exists("o.st") ? ", and a file" : "");
    }
    expect(0, "run nsa $VECTORS/nsa_small.safetensors $DIR/o.st --block-size 32 --stride 32", "");
    assert_true(exists("o.st"));
    assert_int_equal(unlink(path_of("o.st")), 0);
    check_no_leftovers();
}

static const char *const signals[] = {"HUP", "INT", "TERM"};
static const int codes[] = {129, 130, 143};

/* A command that waits until standard output takes its JSON. */
static void a_signal_while_printing_leaves_no_result(void **state)
{
    (void)state;
    for (int i = 0; i < 3; i++) {
        char prefix[200];
        snprintf(prefix, sizeof prefix,
                 "mkfifo $DIR/full; exec 3<>$DIR/full; head -c 65536 /dev/zero >&3; "
                 "exec timeout --preserve-status -k 20 -s %s 2",
                 signals[i]);
        assert_int_equal(run_with(prefix, "run nsa $VECTORS/nsa_small.safetensors $DIR/o.st --block-size 32 "
                                          "--stride 32 --json >&3"),
                         codes[i]);
        assert_false(exists("o.st"));
        assert_int_equal(unlink(path_of("full")), 0);
    }
    check_no_leftovers();
}

static void results_go_where_the_path_leads(void **state)
{
    static char text[1 << 16];
    struct stat st;
    (void)state;
    write_text("b.json", "old", 3);
    write_text("b.json.tmp", "foreign", 7);
    assert_int_equal(chmod(path_of("b.json"), 0640), 0);
    expect(0, "bench " ATTENTION "--json $DIR/b.json", "attention");
    assert_int_equal(stat(path_of("b.json"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0640);
    read_text("b.json", text, sizeof text);
    assert_non_null(strstr(text, "\"schema\": 1"));
    read_text("b.json.tmp", text, sizeof text);
    assert_string_equal(text, "foreign");
    assert_int_equal(unlink(path_of("b.json.tmp")), 0);
    assert_int_equal(symlink("made.json", path_of("link.json")), 0); /* to nothing yet */
    expect(0, "bench " ATTENTION "--json $DIR/link.json", "attention");
    assert_int_equal(lstat(path_of("link.json"), &st), 0);
    assert_true(S_ISLNK(st.st_mode) && exists("made.json"));
    expect(0, "bench " ATTENTION "--json /dev/stdout", "\"schema\": 1");
    assert_int_equal(run_with("exec >$DIR/all.txt;", "bench " ATTENTION "--json /dev/stdout"), 0);
    read_text("all.txt", text, sizeof text);
    assert_true(strncmp(text, "op ", 3) == 0 &&
                strstr(text, "\"schema\": 1") > strstr(text, "G/s of attention"));
    assert_int_equal(run_with("mkfifo $DIR/fifo; cat $DIR/fifo >$DIR/through & ",
                              "bench " ATTENTION "--json $DIR/fifo; wait"),
                     0);
    assert_int_equal(stat(path_of("fifo"), &st), 0);
    assert_true(S_ISFIFO(st.st_mode));
    read_text("through", text, sizeof text);
    assert_non_null(strstr(text, "\"schema\": 1"));
    check_no_leftovers();
}

static void unwritable_results_are_found_before_the_work(void **state)
{
    (void)state;
    expect(3, "bench nsa --n 1M --json $DIR/no/such/place", "no/such/place");
    expect(3, "bench nsa --n 1M --json $DIR", "folder");
    expect(3, "run attention $DIR/none $DIR/no/such/place", "no/such/place");
    assert_int_equal(run("bench " ATTENTION "--json /dev/full"), 3);
    assert_non_null(strstr(output, "/dev/full"));
    check_no_leftovers();
}

static void charts_are_drawn_without_telling_gnuplot_a_path(void **state)
{
    static char text[1 << 16];
    (void)state;
    if (system("command -v gnuplot >/dev/null") != 0) skip();
    expect(0, "bench " ATTENTION "--svg \"$DIR/it's \\\"; system('touch pwned') \\`touch pwned\\`.svg\"",
           "attention");
    assert_int_equal(access("pwned", F_OK), -1);
    assert_true(read_text("it's \"; system('touch pwned') `touch pwned`.svg", text, sizeof text) > 1000);
    assert_non_null(strstr(text, "<svg"));
    assert_int_equal(run("bench " ATTENTION "--svg /dev/full"), 3);
    assert_non_null(strstr(output, "/dev/full"));
    assert_int_equal(run_with("PATH=/nowhere", "bench " ATTENTION "--svg $DIR/none.svg"), 4);
    assert_false(exists("none.svg"));
    check_no_leftovers();
}

/* long.st: dense attention of 128k tokens, which takes seconds. */
static void save_long_attention(void)
{
    static const char *const names[] = {"Q", "K", "V"};
    const int64_t shape[] = {1, 131072, 1, 16};
    float *zeros = calloc(131072 * 16, sizeof *zeros);
    assert_non_null(zeros);
    const quern_tensor t = quern_tensor_contiguous(zeros, QUERN_F32, 4, shape);
    quern_safetensors_item items[3];
    for (int i = 0; i < 3; i++) items[i] = (quern_safetensors_item){names[i], &t};
    assert_int_equal(quern_safetensors_save(path_of("long.st"), items, 3, NULL, 0), QUERN_OK);
    free(zeros);
}

/* Each verb that takes long is stopped while it works: ceilings too, which need all their memory for that. */
static void signals_end_a_command_at_once(void **state)
{
    static const char *const commands[] = {"bench nsa --n 256k --reps 99 --json $DIR/s.json --svg $DIR/s.svg",
                                           "probe attention --memory 400M --backward", "info --measure",
                                           "run attention $DIR/long.st $DIR/s.st",
                                           "run attention $DIR/long.st $DIR/kept.st"};
    char kept[16];
    (void)state;
    save_long_attention();
    write_text("kept.st", "older", 5);
    for (size_t i = 0; i < 3 * sizeof commands / sizeof *commands; i++) {
        char prefix[120];
        struct timespec before, after;
        snprintf(prefix, sizeof prefix,
                 "exec env -u QUERN_CEILING_MIB timeout --preserve-status -k 20 -s %s 0.3", signals[i % 3]);
        clock_gettime(CLOCK_MONOTONIC, &before);
        const int code = run_with(prefix, commands[i / 3]);
        clock_gettime(CLOCK_MONOTONIC, &after);
        const double seconds =
            (double)(after.tv_sec - before.tv_sec) + 1e-9 * (double)(after.tv_nsec - before.tv_nsec);
        if (code != codes[i % 3] || seconds > 2)
            fail_msg("quern %s: exit code %d after %.1f s: %s", commands[i / 3], code, seconds, output);
    }
    assert_false(exists("s.json") || exists("s.svg") || exists("s.st"));
    read_text("kept.st", kept, sizeof kept);
    assert_string_equal(kept, "older");
    assert_int_equal(unlink(path_of("long.st")), 0);
    check_no_leftovers();
}

static void save(const char *name, const quern_tensor *t)
{
    const quern_safetensors_item item = {"x", t};
    assert_int_equal(quern_safetensors_save(path_of(name), &item, 1, NULL, 0), QUERN_OK);
}

static void save_f32(const char *name, float a, float b, float c)
{
    float values[] = {a, b, c};
    const quern_tensor t = quern_tensor_contiguous(values, QUERN_F32, 1, (const int64_t[]){3});
    save(name, &t);
}

static void compare_counts_nonfinite_values(void **state)
{
    (void)state;
    save_f32("a.st", 1, NAN, NAN);
    save_f32("b.st", 1, 2, NAN);
    expect(1, "compare $DIR/a.st $DIR/b.st", "FAIL (NaN: 2)");
    expect(1, "compare $DIR/b.st $DIR/a.st --json", "\"nan\": 2");
    assert_non_null(strstr(output, "\"max\": 0.0"));
    assert_non_null(strstr(output, "\"pass\": false"));
    expect(1, "compare $DIR/a.st $DIR/a.st --tolerance 1e30", "(NaN: 2)");
    save_f32("a.st", INFINITY, 2, -INFINITY);
    save_f32("b.st", INFINITY, INFINITY, INFINITY);
    expect(1, "compare $DIR/a.st $DIR/b.st", "(infinities differ: 2)");
    expect(1, "compare $DIR/a.st $DIR/b.st --json", "\"infinite\": 2");
    save_f32("a.st", INFINITY, 2, 3);
    save_f32("b.st", INFINITY, 2, 3);
    expect(0, "compare $DIR/a.st $DIR/b.st --tolerance 0", "PASS");
    save_f32("b.st", 0, 0, 0);
    save_f32("a.st", 0, 1e-30f, 0);
    expect(1, "compare $DIR/a.st $DIR/b.st --tolerance 1e30", "only zeros are expected");
    double large[2][2] = {{1e308, 1}, {-1e308, 1}};
    quern_tensor t = quern_tensor_contiguous(large[0], QUERN_F64, 1, (const int64_t[]){2});
    save("a.st", &t);
    t.data = large[1];
    save("b.st", &t);
    expect(1, "compare $DIR/a.st $DIR/b.st --json", "\"max\": 2.0");
}

static void compare_says_what_is_exact(void **state)
{
    (void)state;
    save_f32("a.st", 1, 2, 3);
    save_f32("b.st", 1, 2.97f, 3);
    expect(1, "compare $DIR/a.st $DIR/b.st --json", "\"exact\": false");
    assert_non_null(strstr(output, "\"unequal\": 1"));
    expect(0, "compare $DIR/a.st $DIR/b.st --json --tolerance 1", "\"exact\": false");
    expect(0, "compare $DIR/a.st $DIR/b.st --tolerance 1", "PASS\n");
    expect(0, "compare $DIR/a.st $DIR/a.st --json", "\"exact\": true");
    assert_non_null(strstr(output, "\"unequal\": 0"));
    save_f32("a.st", NAN, 2, INFINITY);
    expect(1, "compare $DIR/a.st $DIR/a.st --json", "\"exact\": false");
    assert_non_null(strstr(output, "\"unequal\": 1"));
}

static void compare_is_exact_about_integers_and_dtypes(void **state)
{
    int64_t wide[2] = {(int64_t)1 << 53, ((int64_t)1 << 53) + 1}; /* the same number as a double */
    float one = 1;
    int32_t integer = 1;
    uint16_t half = 0x3c00;
    uint8_t bytes[2] = {0x7f, 0xff}; /* e4m3: NaN and NaN, but other bits */
    quern_tensor t = quern_tensor_contiguous(&wide[0], QUERN_I64, 0, NULL);
    (void)state;
    save("a.st", &t);
    t.data = &wide[1];
    save("b.st", &t);
    expect(1, "compare $DIR/a.st $DIR/b.st --tolerance 1", "(unequal: 1)");
    expect(1, "compare $DIR/a.st $DIR/b.st --json", "\"unequal\": 1");
    t = quern_tensor_contiguous(&one, QUERN_F32, 0, NULL);
    save("a.st", &t);
    t = quern_tensor_contiguous(&integer, QUERN_I32, 0, NULL);
    save("b.st", &t);
    expect(1, "compare $DIR/a.st $DIR/b.st", "(dtypes differ: f32, i32)");
    expect(1, "compare $DIR/a.st $DIR/b.st --json", "\"same_dtype\": false");
    expect(1, "compare $DIR/a.st $DIR/b.st --widen", "dtypes differ");
    t = quern_tensor_contiguous(&half, QUERN_F16, 0, NULL);
    save("b.st", &t);
    expect(1, "compare $DIR/a.st $DIR/b.st", "dtypes differ");
    expect(0, "compare $DIR/a.st $DIR/b.st --widen", "PASS");
    t = quern_tensor_contiguous(&bytes[0], QUERN_E4M3, 0, NULL);
    save("a.st", &t);
    expect(0, "compare $DIR/a.st $DIR/a.st", "PASS");
    t.data = &bytes[1];
    save("b.st", &t);
    expect(1, "compare $DIR/a.st $DIR/b.st", "(unequal: 1)");
}

static void comparing_many_tensors_is_not_quadratic(void **state)
{
    enum { MANY = 50000 };
    static char names[MANY][16];
    static quern_safetensors_item items[MANY];
    const quern_tensor nothing = quern_tensor_contiguous(NULL, QUERN_U8, 1, (const int64_t[]){0});
    (void)state;
    for (int i = 0; i < MANY; i++) {
        snprintf(names[i], sizeof *names, "t%d", i);
        items[i] = (quern_safetensors_item){names[i], &nothing};
    }
    assert_int_equal(quern_safetensors_save(path_of("many.st"), items, MANY, NULL, 0), QUERN_OK);
    const time_t before = time(NULL);
    assert_int_equal(run("compare $DIR/many.st $DIR/many.st >/dev/null"), 0);
    assert_true(time(NULL) - before < 10); /* a pass over all for each name takes minutes */
}

/* Q, K and V of a dtype, by every verb that reads files. */
static void an_unsupported_dtype_has_one_exit_code(void **state)
{
    static float zeros[64];
    (void)state;
    for (int dtype = QUERN_F32; dtype <= QUERN_E5M2FNUZ; dtype++) {
        const quern_tensor t =
            quern_tensor_contiguous(zeros, (quern_dtype)dtype, 4, (const int64_t[]){1, 2, 1, 8});
        const quern_safetensors_item items[] = {{"Q", &t}, {"K", &t}, {"V", &t}};
        const bool takes = dtype == QUERN_F32 || dtype == QUERN_F16 || dtype == QUERN_BF16;
        assert_int_equal(quern_safetensors_save(path_of("dtype.st"), items, 3, NULL, 0), QUERN_OK);
        expect(0, "compare $DIR/dtype.st $DIR/dtype.st", "PASS");
        expect(0, "info --file $DIR/dtype.st", quern_dtype_name((quern_dtype)dtype));
        expect(takes ? 0 : 3, "run attention $DIR/dtype.st $DIR/out.st",
               takes ? "" : quern_dtype_name((quern_dtype)dtype));
        expect(takes ? 0 : 3, "run nsa $DIR/dtype.st $DIR/out.st",
               takes ? "" : quern_dtype_name((quern_dtype)dtype));
    }
    static const char sixes[] =
        "\x3a\0\0\0\0\0\0\0{\"Q\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],\"data_offsets\":[0,3]}}abc";
    static char file[sizeof sixes - 1];
    memcpy(file, sixes, sizeof file);
    file[0] = (char)(sizeof file - 8 - 3);
    write_text("six.st", file, sizeof file);
    expect(3, "run attention $DIR/six.st $DIR/out2.st", "F6_E2M3");
    expect(3, "compare $DIR/six.st $DIR/six.st", "F6_E2M3");
    expect(3, "info --file $DIR/six.st", "F6_E2M3");
    expect(0, "info --file $VECTORS/nsa_small.safetensors --json", "\"name\": \"full.block_idx_sorted\"");
    expect(3, "info --file $DIR/none.st", "none.st");
    assert_false(exists("out2.st"));
}

static void sentences_hold_no_control_characters_and_keep_their_reason(void **state)
{
    static const char *const commands[] = {
        "\"$(printf 'a\\033[31mb')\"",
        "run \"$(printf 'x\\033y')\" a b",
        "compare \"$(printf 'no\\033[2Jfile')\" b",
        "bench attention --heads \"$(printf '1\\a')\"",
        "probe nsa --memory \"$(printf '\\033c')\"",
        "compare $VECTORS/nsa_small.safetensors $VECTORS/nsa_small.safetensors \"$(printf 'a\\nb')\""};
    (void)state;
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        assert_in_range(run(commands[i]), 2, 3);
        for (const char *c = output; *c != '\0'; c++)
            if ((unsigned char)*c < ' ' && c[1] != '\0')
                fail_msg("quern %s: a control character in: %s", commands[i], output);
        assert_non_null(strstr(output, "\\x"));
    }
    expect(3, "compare \"$(printf 'long/%.0s' $(seq 700))end.safetensors\" b", "No such file");
    assert_non_null(strstr(output, "long/end.safetensors"));
    assert_int_equal(run("run attention $VECTORS/nsa_small.safetensors \"$(printf 'long/%.0s' $(seq "
                         "700))end.safetensors\""),
                     3);
    assert_non_null(strstr(output, "No such file"));
    assert_int_equal(run_with("QUERN_CPU=$(printf '\\033z%.0s' $(seq 700))", "info"), 3);
    assert_non_null(strstr(output, "\\x1bz"));
    assert_non_null(strstr(output, "avx512bf16 or amx is accepted"));
    assert_int_equal(run_with("QUERN_CUDA_LIBRARY=$(printf 'no/%.0s' $(seq 900))", "info --device cuda"), 4);
    assert_non_null(strstr(output, "is needed"));
}

/* Where address space is short: an exit code of the machine, or fewer threads. */
static void too_little_memory_is_reported(void **state)
{
    static const char header[] =
        "{\"Q\":{\"dtype\":\"U8\",\"shape\":[4294967296],\"data_offsets\":[0,4294967296]}}";
    static const char *const readers[] = {"compare $DIR/wide.st $DIR/wide.st", "info --file $DIR/wide.st",
                                          "run attention $DIR/wide.st $DIR/out3.st"};
    char file[8 + sizeof header - 1] = {sizeof header - 1};
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* the sanitizer's own memory takes terabytes of address space */
#endif
    memcpy(file + 8, header, sizeof header - 1);
    write_text("wide.st", file, sizeof file);
    assert_int_equal(truncate(path_of("wide.st"), (off_t)sizeof file + 4294967296), 0); /* a hole */
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++) {
        const int code = run_with("ulimit -v 2000000;", readers[i]);
        if (code != 4 || strstr(output, "Cannot allocate memory") == NULL)
            fail_msg("quern %s: exit code %d: %s", readers[i], code, output);
    }
    /* A thread's stack alone is more than the limit. */
    const int code = run_with("ulimit -s 2000000; ulimit -v 1000000; OMP_NUM_THREADS=1",
                              "bench attention --n 64 --heads 2/1 --dim 16 --threads 3 --reps 1 --no-peer");
    if (code != 0) fail_msg("without threads: exit code %d: %s", code, output);
    assert_false(exists("out3.st"));
    assert_int_equal(unlink(path_of("wide.st")), 0);
}

/* Whatever the limit of the address space, fewer threads serve or a sentence says what is missing: neither
 * OpenMP nor oneDNN ends the process. Under the least the loader finds no room. */
static void threads_that_cannot_be_created_end_no_bench(void **state)
{
    static const char *const subjects[] = {
        "attention --n 256 --heads 4/2 --dim 64 --threads 8 --reps 1",
        "nsa --n 256 --heads 2/1 --dim 64 --threads 8 --reps 1 --no-peer",
        "overhead --threads 8",
    };
    int done = 0;
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    skip(); /* the sanitizer's own memory takes terabytes of address space */
#endif
    for (int mebibytes = 50; mebibytes <= 200; mebibytes += 15)
        for (size_t i = 0; i < sizeof subjects / sizeof *subjects; i++) {
            char limit[96], arguments[128];
            snprintf(limit, sizeof limit, "ulimit -v %d; OMP_WAIT_POLICY=passive OMP_NUM_THREADS=8",
                     mebibytes * 1024);
            snprintf(arguments, sizeof arguments, "bench %s", subjects[i]);
            const int code = run_with(limit, arguments);
            if (code == 0) done++;
            if (code != 0 && code != 127 && (code != 4 || strstr(output, "quern bench: no memory") == NULL))
                fail_msg("%d MiB, quern %s: exit code %d: %s", mebibytes, arguments, code, output);
        }
    assert_true(done > 0);
    const int code =
        run_with("ulimit -v 100000; OMP_WAIT_POLICY=passive OMP_NUM_THREADS=8", "bench ceilings --threads 8");
    if (code != 127 && (code != 4 || strstr(output, "no memory for the ceilings") == NULL))
        fail_msg("ceilings: exit code %d: %s", code, output);
}

/* Every option that takes an integer, with the largest and the least there is. */
static void huge_integers_are_refused_or_done(void **state)
{
    static const char *const verbs[] = {
        "probe nsa --memory 1M --dry-run",
        "probe attention --memory 1M --dry-run",
        "bench nsa --n 64 --heads 2/1 --dim 16 --reps 1 --no-peer --backward",
        "bench attention --n 64 --heads 2/1 --dim 16 --reps 1 --no-peer --backward",
        "bench compress --n 64 --heads 2/1 --dim 16 --reps 1 --compress linear",
        "bench select --n 64 --heads 2/1 --dim 16 --reps 1 --selection given",
        "bench nsa --n 64 --heads 2/1 --dim 16 --reps 1 --no-peer --selection given --metric mean_logit",
        "run nsa $VECTORS/nsa_small.safetensors $DIR/huge.st",
        "run nsa-list-convert $DIR/list.st $DIR/huge.st"};
    static const char *const options[] = {"batch",
                                          "seed",
                                          "granularity",
                                          "documents",
                                          "reps",
                                          "threads",
                                          "window",
                                          "block-size",
                                          "stride",
                                          "select-block",
                                          "num-selected",
                                          "tile",
                                          "forced-first",
                                          "forced-local",
                                          "max-compressed-groups",
                                          "query-offset",
                                          "from",
                                          "to",
                                          "n"};
    static const char *const values[] = {"9223372036854775807", "-9223372036854775808", "4611686018427387904",
                                         "4294967297"};
    int32_t indices[4] = {0, 1, 2, -1};
    uint64_t index = 0;
    const quern_tensor list = quern_tensor_contiguous(indices, QUERN_I32, 4, (const int64_t[]){1, 1, 1, 4});
    const quern_safetensors_item item = {"block_idx", &list};
    (void)state;
    assert_int_equal(quern_safetensors_save(path_of("list.st"), &item, 1, NULL, 0), QUERN_OK);
    for (size_t v = 0; v < sizeof verbs / sizeof *verbs; v++) {
        for (size_t o = 0; o < sizeof options / sizeof *options; o++) {
            for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
                char arguments[300];
                if (!test_in_share(index++)) continue;
                snprintf(arguments, sizeof arguments, "%s --%s %s", verbs[v], options[o], values[i]);
                const int code = run_with("ASAN_OPTIONS=allocator_may_return_null=1 timeout 20", arguments);
                if (code == 1 || code > 4) fail_msg("quern %s: exit code %d: %s", arguments, code, output);
                const char *sentence = output;
                while (strncmp(sentence, "==", 2) == 0 && strchr(sentence, '\n') != NULL)
                    sentence = strchr(sentence, '\n') + 1; /* a sanitizer's */
                if (code >= 2 && strchr(sentence, '\n') != sentence + strlen(sentence) - 1)
                    fail_msg("quern %s: %s", arguments, output);
                if (strstr(output, "unknown") != NULL) break; /* no option of this verb */
            }
        }
    }
    expect(2, "probe nsa --batch 9223372036854775807", "--batch 9223372036854775807");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_full_standard_output_is_an_error),
        cmocka_unit_test(without_a_standard_output_no_result_is_written),
        cmocka_unit_test(a_signal_while_printing_leaves_no_result),
        cmocka_unit_test(results_go_where_the_path_leads),
        cmocka_unit_test(unwritable_results_are_found_before_the_work),
        cmocka_unit_test(charts_are_drawn_without_telling_gnuplot_a_path),
        cmocka_unit_test(signals_end_a_command_at_once),
        cmocka_unit_test(compare_counts_nonfinite_values),
        cmocka_unit_test(compare_says_what_is_exact),
        cmocka_unit_test(compare_is_exact_about_integers_and_dtypes),
        cmocka_unit_test(comparing_many_tensors_is_not_quadratic),
        cmocka_unit_test(an_unsupported_dtype_has_one_exit_code),
        cmocka_unit_test(sentences_hold_no_control_characters_and_keep_their_reason),
        cmocka_unit_test(too_little_memory_is_reported),
        cmocka_unit_test(threads_that_cannot_be_created_end_no_bench),
        cmocka_unit_test(huge_integers_are_refused_or_done),
    };
    return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
