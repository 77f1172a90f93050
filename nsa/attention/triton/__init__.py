"""Attention by Triton kernels; nothing here is imported before somebody asks for them.

A folder for each branch and for what is between them: there `tiles` says how the work is cut,
`launch` starts the kernels, and the others are kernels. What torch sees is in `operators`. Beside
the folders, `availability` says whether the kernels can run, `tiles` which shapes they take,
`tuned` how they are cut on a measured device; `rows` has the parts of kernels, `launch` those of a
launch.
"""
