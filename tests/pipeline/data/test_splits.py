"""Splits are deterministic functions of the prompt's text."""

import hashlib
from dataclasses import replace

import pytest

from pipeline.data.load import held_out_point, mixed_sizes, stage_of, stage_point
from pipeline.data.records import Conversation, Message, Preference, Prompt
from pipeline.data.sources import digest, digest_of, first_turn

USER = Message("user", "How much is 2 + 2?")
FOUR, FIVE = Message("assistant", "4"), Message("assistant", "5")


def test_split_points_are_bytes_of_sha256() -> None:
    key = digest(Prompt((USER,), "a"))
    assert key == hashlib.sha256(b"user\x1fHow much is 2 + 2?").digest()
    assert held_out_point(key) == pytest.approx(int(key.hex()[:16], 16) / 16**16, abs=1e-12)
    assert stage_point(key) == pytest.approx(int(key.hex()[16:32], 16) / 16**16, abs=1e-12)


def test_a_prompt_has_the_same_digest_in_every_record_and_source() -> None:
    conversation = Conversation((USER, Message("assistant", "4")), "b")
    assert digest(conversation) == digest(Prompt((USER,), "a")) == digest(Preference((USER,), FOUR, FIVE, "c"))
    assert digest(Prompt((Message("system", USER.content),), "a")) != digest(Prompt((USER,), "a"))
    assert digest(Prompt((replace(USER, fields='{"tools": []}'),), "a")) != digest(Prompt((USER,), "a"))
    assert digest_of([USER, replace(FOUR, reasoning="2 and 2")]) != digest_of([USER, FOUR])
    assert digest(Prompt((Message("user", "Grüße \ud800"),), "a"))  # a lone surrogate, which JSON may contain


def test_the_first_turn_is_the_system_message_and_the_first_question() -> None:
    system, answer = Message("system", "Be brief."), Message("assistant", "4")
    turn = hashlib.sha256(b"user\x1fhow much is 2 + 2?").digest()
    assert first_turn(Prompt((USER,), "a")) == turn
    assert first_turn(Conversation((Message("user", " HOW much\nis  2 + 2? "), answer), "b")) == turn
    assert first_turn(Preference((USER, answer, Message("user", "Why?")), FOUR, FIVE, "c")) == turn
    with_system = hashlib.sha256(b"system\x1fbe brief.\x1euser\x1fhow much is 2 + 2?").digest()
    assert first_turn(Conversation((system, USER, answer, Message("user", "Why?"), answer), "b")) == with_system


def test_shares_are_exact_and_independent_of_the_held_out_share() -> None:
    keys = [digest(Prompt((Message("user", str(i)),), "a")) for i in range(6_000)]
    held_out = {key for key in keys if held_out_point(key) < 0.1}
    assert len(held_out) / len(keys) == pytest.approx(0.1, abs=0.01)
    for group in (held_out, set(keys) - held_out):
        stages = [stage_of(key, {"sft": 0.2, "reward": 0.4, "ppo": 0.4}) for key in group]
        assert stages.count("sft") / len(group) == pytest.approx(0.2, abs=0.03)
        assert stages.count("ppo") / len(group) == pytest.approx(0.4, abs=0.03)


def test_shares_are_renormalised_over_the_stages_served() -> None:
    keys = [digest(Prompt((Message("user", str(i)),), "a")) for i in range(5_000)]
    stages = [stage_of(key, {"sft": 0.2, "ppo": 0.4}) for key in keys]
    assert set(stages) == {"sft", "ppo"}
    assert stages.count("sft") / len(keys) == pytest.approx(1 / 3, abs=0.03)
    assert {stage_of(key, {"sft": 1.0, "reward": 0.0}) for key in keys} == {"sft"}


def test_a_mix_has_no_repeats_and_uses_the_scarcest_source_fully() -> None:
    assert mixed_sizes([100, 300], [1, 1]) == [100, 100]
    assert mixed_sizes([100, 300], [1, 3]) == [100, 300]
    assert mixed_sizes([100, 300], [2, 1]) == [100, 50]
    assert mixed_sizes([1000, 90, 500], [6, 1, 3]) == [540, 90, 270]
    assert mixed_sizes([5, 1000], [1000, 1]) == [5, 1]
