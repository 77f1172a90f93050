"""Read-only judgement of any run directory, ours or foreign."""
