/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "families.h"

#include "attention/attention.h"
#include "nsa/call.h"

const struct op_family *const quern_families[] = {&attention_family, &nsa_family, &nsa_list_family, NULL};
