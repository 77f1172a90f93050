"""The shipped phases: one file and one class for each section of the validation runbook.

They are found through the entry points `runbook.phases`; what two of them share is in the
folders: the `kit`, and rows about `training`, the `machine` and what they `compare`.
"""
