"""The engine: runs a plan and leaves a record. Never imports torch."""
