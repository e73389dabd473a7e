# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Quern inside other libraries: quern.integrations.transformers."""
