"""A second optimizer and a second gradient beside the real ones, in drawn steps."""
