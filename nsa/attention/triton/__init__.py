"""Attention by Triton kernels; nothing here is imported before somebody asks for them.

What torch sees is in `operators`. `tiles` and `selected_tiles` say which shapes and devices the
kernels take and how their work is cut, `launch` what every launch of them needs, `rows` what every
kernel does. A branch has a file or a folder, `core` the kernels that serve several, and what
launches them all.
"""
