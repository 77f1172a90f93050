"""The compressed branch, and the choice of blocks by its scores."""
