"""Rows that hold throughputs against each other: arms, ranks, nodes, a floor, earlier runs."""
