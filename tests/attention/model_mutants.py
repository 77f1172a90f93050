"""Defects of the whole model, outside the attention's core: (name, file below nsa/, old, new).

`nsa/tests/test_whole_model.py` alone has to notice each of them.
"""

from __future__ import annotations

_PARTS = "        parts = self.project(x, norm)\n"
_TURNED = 'elif name[0] == "v":\n                target'


def _instead(changes: str) -> str:
    """The layer's parts with some of them replaced."""
    return f"{_PARTS}        parts = replace(parts, {changes})\n"


def _unturned(part: str) -> str:
    """No rotary positions for one part."""
    return _TURNED.replace(":", f' or name == "{part}":', 1)


_POOLED_FIRST = """runs_per_block = cfg.l // cfg.d
    if x.shape[-1] == cfg.d_k:
        from nsa.projection import rotations

        turns = rotations(torch.arange(x.shape[1]), cfg.d_k, 10_000.0, x.dtype)[:, None]
        plain = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns.conj()
        first = plain.unfold(1, cfg.l, cfg.d).mean(-1) * turns[:: cfg.d][:n]
        return torch.view_as_real(first).flatten(-2)
"""
_LEARNED_FIRST = """self.compress_k(
                split_projection(
                    y, self.gate_bias, torch.ones_like(self.turns(y.shape[1], y)), self.cfg
                ).k_cmp
            )"""

MODEL_DEFECTS: tuple[tuple[str, str, str, str], ...] = (
    # The layer's branches.
    (
        "attention output times 0",
        "model.py",
        "x = x + self.attention(",
        "x = x + 0 * self.attention(",
    ),
    ("compressed branch zero", "layer.py", _PARTS, _instead("v_cmp=0 * parts.v_cmp")),
    ("selected branch zero", "layer.py", _PARTS, _instead("v_sel=0 * parts.v_sel")),
    ("sliding branch zero", "layer.py", _PARTS, _instead("v_win=0 * parts.v_win")),
    (
        "selected branch sees the first key only",
        "layer.py",
        _PARTS,
        _instead("v_sel=parts.v_sel[:, :, :1].expand_as(parts.v_sel).contiguous()"),
    ),
    (
        "compressed branch sees the first key only",
        "layer.py",
        _PARTS,
        _instead("v_cmp=parts.v_cmp[:, :, :1].expand_as(parts.v_cmp).contiguous()"),
    ),
    (
        "sliding branch uses the selected keys",
        "layer.py",
        _PARTS,
        _instead("k_win=parts.k_sel"),
    ),
    (
        "selected branch uses the sliding values",
        "layer.py",
        _PARTS,
        _instead("v_sel=parts.v_win"),
    ),
    (
        "groups change places",
        "layer.py",
        _PARTS,
        _instead("k_sel=parts.k_sel.flip(1)"),
    ),
    ("sequences change places", "layer.py", _PARTS, _instead("v_win=parts.v_win.flip(0)")),
    ("heads in another order", "layer.py", "out.flatten(2)", "out.flip(2).flatten(2)"),
    # Gates.
    ("gates constant", "projection.py", ".sigmoid_()", ".zero_().sigmoid_()"),
    (
        "gates shared between heads",
        "layer.py",
        _PARTS,
        _instead("gates=parts.gates[:, :, :, :1].expand_as(parts.gates).contiguous()"),
    ),
    (
        "gates of the neighbouring head",
        "layer.py",
        _PARTS,
        _instead("gates=parts.gates.roll(1, 3)"),
    ),
    (
        "gates that add up to 1",
        "layer.py",
        _PARTS,
        _instead("gates=parts.gates / parts.gates.sum(-1, keepdim=True)"),
    ),
    (
        "gate bias forgotten",
        "projection.py",
        "torch.add(source, bias,",
        "torch.add(source, 0 * bias,",
    ),
    (
        "gate bias forgotten in SDPA",
        "projection.py",
        "(gates.to(wide) + gate_bias.to(wide))",
        "gates.to(wide)",
    ),
    # Positions.
    ("queries not turned", "projection.py", _TURNED, _unturned("q")),
    ("compressed keys not turned", "projection.py", _TURNED, _unturned("k_cmp")),
    ("selected keys not turned", "projection.py", _TURNED, _unturned("k_sel")),
    ("sliding keys not turned", "projection.py", _TURNED, _unturned("k_win")),
    (
        "nothing turned in SDPA",
        "projection.py",
        "(_pairs(source) * turns[:, None])",
        "(_pairs(source) * 1)",
    ),
    ("turned the other way", "projection.py", "(angle), angle)", "(angle), -angle)"),
    (
        "another base of the angles",
        "layer.py",
        "self.rope_base = rope_base",
        "self.rope_base = 5e5",
    ),
    ("positions begin again", "projection.py", "positions.to(", "(positions % 16).to("),
    (
        "compression pooled before rotation",
        "attention/compression.py",
        "runs_per_block = cfg.l // cfg.d\n",
        _POOLED_FIRST,
    ),
    (
        "learned compression before rotation",
        "layer.py",
        "self.compress_k(parts.k_cmp)",
        _LEARNED_FIRST,
    ),
    (
        "compressed keys and values pooled apart",
        "attention/sdpa.py",
        "pooled.split_with_sizes((cfg.d_k, cfg.d_v), -1)",
        "pooled[..., : cfg.d_k], pooled[..., : cfg.d_v]",
    ),
    # Learned compression.
    ("no position inside a block", "layer.py", " + self.position", " + 0 * self.position"),
    ("compression without its curve", "layer.py", "nn.GELU()", "nn.Identity()"),
    ("compression with another curve", "layer.py", "nn.GELU()", 'nn.GELU(approximate="tanh")'),
    # The layer and the model.
    ("attention without residual", "model.py", "x = x + self.attention(", "x = self.attention("),
    ("mlp without residual", "model.py", "out: Tensor = x + self.mlp(", "out: Tensor = self.mlp("),
    (
        "attention without norm",
        "model.py",
        "self.attention(self.attention_norm(x))",
        "self.attention(x)",
    ),
    ("mlp without norm", "model.py", "self.mlp(self.mlp_norm(x))", "self.mlp(x)"),
    ("norms change places", "model.py", "self.mlp(self.mlp_norm(", "self.mlp(self.attention_norm("),
    ("no last norm", "model.py", "self.head(self.norm(x))", "self.head(x)"),
    ("layer norm", "model.py", "self.norm = nn.RMSNorm(", "self.norm = nn.LayerNorm("),
    (
        "another epsilon",
        "model.py",
        "self.norm = nn.RMSNorm(dim, eps=cfg.norm_eps)",
        "self.norm = nn.RMSNorm(dim, eps=1e-5)",
    ),
    ("mlp gate and up swapped", "model.py", "gate, up =", "up, gate ="),
    ("mlp with another curve", "model.py", "functional.silu(", "functional.gelu("),
    ("head not tied", "model.py", "if cfg.tie_embeddings:", "if False:"),
    ("head always tied", "model.py", "if cfg.tie_embeddings:", "if True:"),
    ("last layer skipped", "model.py", "in self.layers:", "in self.layers[:-1]:"),
    (
        "layers share their weights",
        "model.py",
        "nn.ModuleList(Layer(cfg) for _ in range(cfg.n_layers))",
        "nn.ModuleList([Layer(cfg)] * cfg.n_layers)",
    ),
    # What the plan makes of the config.
    (
        "the plan ties every head",
        "train/launch.py",
        "tie_embeddings=config.model.tie_embeddings",
        "tie_embeddings=True",
    ),
    ("the plan forgets a layer", "train/launch.py", "config.model.n_layers", "1"),
    (
        "the trainer's window is one longer",
        "settings.py",
        "**nsa.model_dump())",
        '**{**nsa.model_dump(), "w": nsa.w + 1})',
    ),
    # Loss and gradients only: the outputs are right.
    (
        "loss of the tokens themselves",
        "train/engine.py",
        "return loss(logits, tokens[:, 1:])",
        "return loss(logits, tokens[:, :-1])",
    ),
    (
        "half of each sequence trained",
        "train/engine.py",
        "logits = call(tokens[:, :-1])",
        "tokens = tokens[:, : tokens.shape[1] // 2 + 1]\n            logits = call(tokens[:, :-1])",
    ),
    (
        "micro-batches are summed",
        "train/engine.py",
        "self.loss(tokens) / len(batches)",
        "self.loss(tokens)",
    ),
    (
        "turned gradients are not turned back",
        "projection.py",
        "rotate_into(grad, back, views[name])",
        "rotate_into(grad, turns, views[name])",
    ),
    (
        "gradient of the gates without the sigmoid's",
        "projection.py",
        "grad * gates * (1 - gates)",
        "grad * gates",
    ),
    (
        "the window has keys and values of row 0 from the third row on",
        "attention/cpu/function.py",
        "attend_pieces(q[b], keys[2][b], values[2][b],",
        "attend_pieces(q[b], keys[2][b % 2], values[2][b % 2],",
    ),
    (
        "the backward pass has the first two rows only",
        "attention/cpu/function.py",
        "for b in range(q.shape[0]):",
        "for b in range(min(2, q.shape[0])):",
    ),
    (
        "gate bias gets the first sequence's gradient",
        "projection.py",
        ".sum((0, 2), dtype=ctx.bias_dtype)",
        "[:1].sum((0, 2), dtype=ctx.bias_dtype)",
    ),
    ("gates get no gradient", "layer.py", _PARTS, _instead("gates=parts.gates.detach()")),
    ("compressed keys get no gradient", "layer.py", _PARTS, _instead("k_cmp=parts.k_cmp.detach()")),
    ("selected keys get no gradient", "layer.py", _PARTS, _instead("k_sel=parts.k_sel.detach()")),
    ("sliding values get no gradient", "layer.py", _PARTS, _instead("v_win=parts.v_win.detach()")),
    (
        "recomputed layers pass no gradient on",
        "model.py",
        "checkpoint(layer, x,",
        "checkpoint(layer, x.detach(),",
    ),
    (
        "the embedding gets the head's gradient only",
        "model.py",
        "x = self.embedding(tokens)",
        "x = self.embedding(tokens).detach()",
    ),
    (
        "the head gets no gradient",
        "model.py",
        "logits: Tensor = self.head(self.norm(x))",
        "logits: Tensor = self.norm(x) @ self.head.weight.detach().T",
    ),
    # Weights as they begin.
    (
        "all modules draw the same numbers",
        "model.py",
        "            if isinstance(module, nn.Linear):",
        "            torch.manual_seed(7)\n            if isinstance(module, nn.Linear):",
    ),
    (
        "what writes into the residual stream begins five times too large",
        "model.py",
        "residual = 0.02 / math.sqrt(2 * self.cfg.n_layers)",
        "residual = 0.1 / math.sqrt(2 * self.cfg.n_layers)",
    ),
)
