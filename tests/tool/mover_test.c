/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* mover_test.c - the bench's mover reads and writes every line of its streams, and no other. */
#include "cmocka_c11.h"

#include "mover.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 1600, ROW = 512, FEW = 12, GUARD = 4096, BYTES = ROWS * ROW, STREAMS = 2 * MOVER_STREAMS };
static const char sentinel = 0x5a;

static uint64_t word_of(const char *p, size_t i)
{
    uint64_t word;
    memcpy(&word, p + 8 * i, sizeof word);
    return word;
}

static void check(int reads, int writes, int threads, bool back)
{
    char *buffers[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        buffers[i] = aligned_alloc(GUARD, BYTES + 2 * GUARD);
        assert_non_null(buffers[i]);
        memset(buffers[i], sentinel, BYTES + 2 * GUARD);
    }
    uint64_t state = 1;
    mover m = {.reads = reads, .writes = writes, .bytes = BYTES, .few_bytes = ROWS * FEW};
    for (int r = 0; r < reads; r++) {
        for (size_t i = 0; i < BYTES; i++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            buffers[r][GUARD + i] = (char)(state >> 56);
        }
        m.read[r] = buffers[r] + GUARD;
    }
    for (int w = 0; w < writes; w++) m.write[w] = buffers[reads + w] + GUARD;
    char *few = buffers[STREAMS - 1] + GUARD;
    if (back) m.read_few = few;
    else m.write_few = few;
    assert_true(mover_run(&m, threads) > 0);
    for (size_t i = 0; i < BYTES / 8; i++) {
        uint64_t expected = 0;
        for (int r = 0; r < reads; r++) expected ^= word_of(m.read[r], i);
        for (int w = 0; w < writes; w++)
            if (word_of(m.write[w], i) != expected)
                fail_msg("stream %d, byte %zu, %d threads", w, 8 * i, threads);
    }
    for (size_t i = 0; i < ROWS * FEW; i++) assert_int_equal(few[i], back ? sentinel : 0);
    for (size_t i = ROWS * FEW; i < BYTES; i++) assert_int_equal(few[i], sentinel);
    for (int i = 0; i < STREAMS; i++) {
        for (size_t g = 0; g < GUARD; g++)
            assert_true(buffers[i][g] == sentinel && buffers[i][GUARD + BYTES + g] == sentinel);
        free(buffers[i]);
    }
}

static void every_line_is_moved(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 3; threads++) {
        check(4, 0, threads, false);
        check(4, 1, threads, false);
        check(5, 4, threads, true);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_line_is_moved)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
