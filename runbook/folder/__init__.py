"""What lies on the disk, of a run and of each launch: its only readers, and the run's writers.

A format is read here and nowhere else, whoever needs it. Readers never raise for what a file
holds; nothing here judges, signals or waits.
"""
