"""The selected branch by Triton kernels; nothing here is imported before somebody asks for them.

`tiles` says which shapes they take and how they are cut, `index`, `rows` and `columns` hold the
kernels, `launch` starts them, `operators` is what torch sees.
"""
