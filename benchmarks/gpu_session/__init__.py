"""Everything that only a GPU can answer, in stages that can be cut off and go on."""
