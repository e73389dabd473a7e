/* SPDX-FileCopyrightText: The Quern authors
 * SPDX-License-Identifier: BSD-2-Clause */
#include "families.h"

#include "attention/attention.h"
#include "dsv4/call.h"
#include "moe/call.h"
#include "nsa/call.h"

const struct op_family *const quern_families[] = {&attention_family, &nsa_family, &nsa_list_family, &dsv4_compress_family,
                                                 &dsv4_index_family, &dsv4_attention_family,
                                                 &moe_family, NULL};
