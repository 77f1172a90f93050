"""The shipped reports: a run record in, text out.

`view` works out what `pages`, `terminal` and `cases` show. Each format is a `Report` that is found
through the entry points `runbook.reports`. What measures or judges does not belong here.
"""
