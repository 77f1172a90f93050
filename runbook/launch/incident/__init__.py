"""The evidence of a bad end: stacks, flight records, and who did not come."""
