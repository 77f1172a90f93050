"""What ranks compare."""

from __future__ import annotations

import torch

from nsa.launch.ranks import parameter_hash


def test_parameter_hash_sees_one_bit() -> None:
    one = torch.nn.Linear(3, 3)
    before = parameter_hash(one)
    assert before == parameter_hash(one)
    with torch.no_grad():
        one.bias[0] = torch.nextafter(one.bias[0], torch.tensor(10.0))
    assert parameter_hash(one) != before
