"""The runs of a folder as rows, and one number through them."""
