"""`runbook gpu-acceptance`: everything that waits for a GPU, in stages that fit into minutes.

The stages are data (`configs/acceptance/stages.yaml`), and each is a program of its own that exits
by the same codes: whatever ends it, what it had written is kept and handed over.
"""
