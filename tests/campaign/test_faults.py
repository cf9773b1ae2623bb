"""A sample of the campaign of faults with a real stage."""

from tests.campaign.bad_data import chats, lines
from tests.campaign.cases import PPO, SHORT
from tests.campaign.faults import all_cases
from tests.campaign.hang_faults import GRPO
from tests.campaign.inputs import fixtures
from tests.forked_launch import launch
from tests.ranks import Worker

LOOPS_ONCE = """
import os, time

calls = 0

def loop():
    while True: time.sleep(0.01)

def f(answer, row):
    global calls
    calls += 1
    if calls == 4 and os.environ["RANK"] == "1" and not os.path.exists("looped"):  # in step 1
        open("looped", "w").close()
        loop()
    return len(answer) / 7
"""


def test_an_endless_loop_of_a_real_reward_function_is_named_and_the_stage_starts_again() -> None:
    keys = ("ranks=2", "restarts=1", "engine.hang_seconds=1", "name=x", "data.path=a.jsonl", "ppo.batch_size=8",
            "evaluation.temperatures=[1.0]")  # fmt: skip
    with fixtures({"model"}) as folder:
        (folder / "f.py").write_text(LOOPS_ONCE)
        (folder / "a.jsonl").write_text(lines(chats()))
        worker = Worker(launch, folder, [*SHORT, "stage=ppo", "actor=model", *PPO, *GRPO, *keys], {}, environment={})
        output, _ = worker.communicate()
        assert worker.returncode == 0, output
        assert "Traceback" not in output and "ppo: restart 1 of 1" in output
        (error,) = (line for line in output.splitlines() if line.startswith("error:"))
        assert "rank 1 (host" in error and "rank 0" not in error and "phase score, step 1;" in error
        assert "does not reach the collective of the other ranks; it runs loop (" in error and "f.py, line 7)" in error
        assert "in loop" in (folder / "runs" / "x" / "ppo" / "error.txt").read_text()


def test_the_table_has_every_rank_in_every_phase_and_names_of_its_own() -> None:
    names = [f"{case.part}: {case.name}" for case in all_cases()]
    assert len(set(names)) == len(names)
    assert {case.part for case in all_cases()} == {"hang", "disk"}
    for phase in ("generate", "score", "train", "evaluate", "save"):
        assert {f"hang: ppo: rank {rank} stopped in {phase}" for rank in (0, 1)} <= set(names)
