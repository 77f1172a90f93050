"""Attention by Triton kernels; nothing here is imported before somebody asks for them.

`tiles` says which shapes they take and how the selected branch is cut, `index`, `rows`, `columns`
and `blocks` hold its kernels, `launch` starts them, `operators` is what torch sees. The compressed
branch has the same modules with `compressed_` before their names, `top` chooses the blocks, and
`ranges` makes ranges of tokens of them. The window's kernels are in `window` and `window_keys`,
those of one new token on a cache in `decode`, each with its tiles, launches and operators beside
it. `pool` makes the compressed keys and values, `mix` is the gated sum of the branches. All share
the rows of `rows`, the helpers of `launch`, and `registered`.
"""
