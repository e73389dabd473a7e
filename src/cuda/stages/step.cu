/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
/* step.cu - a step of a layer: which sequences run, where their rows go, runs of rows, rows of no
 * sequence. */
#include "variants.cuh"

extern const variant<step_tokens_args> step_tokens_any;
extern const variant<step_places_args> step_places_any;
extern const variant<step_check_args> step_check_any;
extern const variant<copy_rows_args> copy_rows_any;
extern const variant<clear_rows_args> clear_rows_any;

static const variant<step_tokens_args> *const tokens_list[] = {&step_tokens_any};
static const variants<step_tokens_args> tokens(tokens_list);
static const variant<step_places_args> *const places_list[] = {&step_places_any};
static const variants<step_places_args> places(places_list);
static const variant<step_check_args> *const check_list[] = {&step_check_any};
static const variants<step_check_args> check(check_list);
static const variant<copy_rows_args> *const copy_list[] = {&copy_rows_any};
static const variants<copy_rows_args> copy(copy_list);
static const variant<clear_rows_args> *const clear_list[] = {&clear_rows_any};
static const variants<clear_rows_args> clear(clear_list);

static const stage_rows rows([](quern_backend &backend) {
    offer<step_tokens_args, tokens>(backend.step_tokens);
    offer<step_places_args, places>(backend.step_places);
    offer<step_check_args, check>(backend.step_check);
    offer<copy_rows_args, copy>(backend.copy_rows);
    offer<clear_rows_args, clear>(backend.clear_rows);
});
