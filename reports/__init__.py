"""The shipped reports: a run record in, text out.

`view` works out what `formats` show, each a `Report` that is found through the entry points
`runbook.reports`. What measures or judges does not belong here.
"""
