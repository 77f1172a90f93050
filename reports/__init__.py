"""The shipped reports, one file for each format: a run record in, text out.

Each module gives a `Report`, found through the entry points `runbook.reports`; what measures or
judges does not belong here.
"""
