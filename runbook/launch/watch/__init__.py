"""A launch while it runs: its ranks, their silence, their numbers, and what is shown of them."""
