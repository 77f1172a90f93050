"""The shipped reports: a run record in, text out.

`view` works out what `formats` show, each a `Report` that is found through the entry points
`runbook.reports`; `runs_pages` is about several runs. What measures or judges does not belong here.
"""
