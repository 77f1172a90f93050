"""Rows about the machine: checkout, host, devices, links, nodes, before and during a launch."""
