"""Reporting: a DataFrame of records goes in; text, pictures or a page come out.

Nothing here measures or imports jax, and pandas and matplotlib are imported by the functions that
need them, so that the command line starts fast.
"""

from mla_bench.report.frame import rows_of, to_frame, write_csv
from mla_bench.report.plots import write_plots
from mla_bench.report.table import summary_markdown, terminal_tables
from mla_bench.report.words import closing, without_parity

__all__ = [
    "closing",
    "rows_of",
    "summary_markdown",
    "terminal_tables",
    "to_frame",
    "without_parity",
    "write_csv",
    "write_plots",
]
