# SPDX-FileCopyrightText: The Quern authors
# SPDX-License-Identifier: BSD-2-Clause
"""Names that code written for other kernels imports: mslk, csa, bridge. Change the import line and nothing
else."""
