"""What the stacks of a hang tell about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runbook.launch.incident import busy_ranks, stopped_at
from runbook.launch.watch.watchdog import blame
from runbook.records import End, LaunchStatus
from tests.launch.helpers import rank


def test_among_equals_the_one_in_its_own_code_is_to_blame(tmp_path: Path) -> None:
    """All ranks are in backward; one sleeps in a layer, the others wait for its gradients."""
    frames = {
        0: ["/x/torch/autograd/graph.py", "/x/nsa/step/engine.py", "<frozen runpy>"],
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


def test_a_rank_stopped_in_code_of_its_own_not_in_what_that_calls(tmp_path: Path) -> None:
    frames = [
        '  File "<frozen importlib>", line 1 in load',
        '  File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 9 in run',
        '  File "/home/me/mine/data.py", line 7 in fetch',
        '  File "/usr/lib/python3.11/threading.py", line 3 in wait',
        f'  File "{Path.cwd()}/nsa/train/loop.py", line 40 in one_step',
        '  File "/home/me/mine/train.py", line 2 in <module>',
    ]
    text = "Current thread 0x2 (most recent call first):\n" + "\n".join(frames) + "\n"
    (tmp_path / "stackdump_rank1_99.txt").write_text(text)
    end = End(status=LaunchStatus.HUNG, cause="hang", culprit_rank=1)
    assert stopped_at(tmp_path, end) == (
        "/home/me/mine/data.py:7 in fetch()",
        "nsa/train/loop.py:40 in one_step()",
    )
    assert stopped_at(tmp_path, replace(end, culprit_rank=0)) == ()
    assert stopped_at(tmp_path, replace(end, status=LaunchStatus.CRASHED)) == ()
