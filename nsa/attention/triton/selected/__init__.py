"""The selected branch: blocks as ranges and bits, two forms of attention, lists of readers."""
