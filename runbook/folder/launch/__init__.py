"""A launch's folder: its files read as evidence, whole or while they grow."""
