"""What the stacks of a hang tell about it."""

from __future__ import annotations

from pathlib import Path

from runbook.launch.incident import busy_ranks
from runbook.launch.watchdog import blame
from tests.launch.helpers import rank


def test_among_equals_the_one_in_its_own_code_is_to_blame(tmp_path: Path) -> None:
    """All ranks are in backward; one sleeps in a layer, the others wait for its gradients."""
    frames = {
        0: ["/x/torch/autograd/graph.py", "/x/nsa/train/engine.py", "<frozen runpy>"],
        1: ["/x/nsa/attention/selected.py", "/x/torch/autograd/graph.py", "<frozen runpy>"],
    }
    files = []
    for number, names in frames.items():
        thread = "".join(f'  File "{name}", line 7 in f\n' for name in names[:-1])
        text = (
            'Thread 0x1 (most recent call first):\n  File "/x/nsa/train/process.py", line 1 in w\n'
            '  File "/x/threading.py", line 2 in run\n\n'
            f"Current thread 0x2 (most recent call first):\n{thread}"
            f'  File "{names[-1]}", line 3 in _run_module_as_main\n'
        )
        path = tmp_path / f"stackdump_rank{number}_99.txt"
        path.write_text(text)
        files.append(path)
    assert busy_ranks(files) == {1}
    ranks = [rank(0, age=5), rank(1, age=4)]
    assert blame(ranks, {}, busy_ranks(files)).rank == 1
    assert blame(ranks, {}).rank == 0  # without the stacks: the one that is silent longest
    late = [rank(0, age=4, step=4), rank(1, age=4)]
    assert blame(late, {}, busy_ranks(files)).rank == 0  # being behind says more than a stack
