"""Attention by Triton kernels; nothing here is imported before somebody asks for them.

What torch sees is in `operators`. `tiles` says which shapes and devices the kernels take and how
their work is cut, `launch` what every launch of them needs, `rows` what every kernel does. Kernels
with what launches them: the window, what is `between` the branches, and a folder for the compressed
and the selected branch.
"""
