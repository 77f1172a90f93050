"""Rows about a launch that trains: what ran, whether its numbers can be, whether it lasts."""
