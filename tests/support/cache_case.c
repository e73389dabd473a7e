/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* cache_case.c - memory, pages and rows of a cache under test. */
#include "cache_case.h"

#include "cmocka_c11.h"

#include <stdlib.h>
#include <string.h>

void cache_case_make(cache_case *c, const quern_cache_params *params)
{
    memset(c, 0, sizeof *c);
    c->params = *params;
    const int64_t columns = (params->capacity + QUERN_CACHE_PAGE - 1) / QUERN_CACHE_PAGE;
    if (params->page != 0 && params->pages == 0)
        c->params.pages = params->sequences * columns + params->sequences / 2;
    size_t memory, rows;
    if (quern_cache_size(&c->params, &memory, &rows) != QUERN_OK) fail_msg("%s", quern_last_error(NULL));
    c->memory = test_workspace_make(memory);
    const size_t element = quern_dtype_size(params->dtype);
    c->rows = test_workspace_make(rows + element);
    c->rows_at = (char *)c->rows.data +
                 (element - (uintptr_t)c->rows.data % element) % element; /* aligned to the element only */
    c->rows_bytes = rows;
    memset(c->rows_at, 0xff, rows); /* NaN in every dtype */
    if (quern_cache_create(&c->params, c->memory.data, memory, c->rows_at, rows, &c->cache) != QUERN_OK)
        fail_msg("%s", quern_last_error(NULL));
}

void cache_case_free(cache_case *c)
{
    test_workspace_close(&c->memory);
    test_workspace_close(&c->rows);
}

/* Tokens of the sequences, and all rows. */
void *cache_case_copy(const cache_case *c)
{
    const size_t lengths = (size_t)c->params.sequences * sizeof(int64_t);
    char *copy = malloc(lengths + c->rows_bytes + 1);
    for (int64_t s = 0; s < c->params.sequences; s++)
        assert_int_equal(quern_cache_length(c->cache, s, (int64_t *)(void *)copy + s, NULL), QUERN_OK);
    memcpy(copy + lengths, c->rows_at, c->rows_bytes);
    return copy;
}

void cache_case_check_same(const cache_case *c, void *copy)
{
    void *now = cache_case_copy(c);
    assert_memory_equal(copy, now, (size_t)c->params.sequences * sizeof(int64_t) + c->rows_bytes);
    free(now);
    free(copy);
}

test_tensor cache_rows(test_random *random, quern_dtype dtype, const double *values, const int64_t *rows,
                       int64_t n, int64_t b, int64_t c)
{
    const int64_t shape[] = {n, b, c};
    test_tensor t =
        test_tensor_make(random, dtype, 3, shape, (test_layout)test_random_int(random, 0, TEST_LAYOUTS - 1));
    double *chosen = test_doubles(n * b * c);
    for (int64_t i = 0; i < n; i++)
        memcpy(chosen + i * b * c, values + rows[i] * b * c, (size_t)(b * c) * sizeof *chosen);
    test_tensor_set(&t, chosen);
    free(chosen);
    return t;
}
