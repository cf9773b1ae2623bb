"""Episodes: conversations of several turns with a reward function that is a generator.

    def NAME(answer: str, row: dict):
        answer = yield "the next message"      # None: no tokens are left for another answer
        return 1.0                             # the reward, or a dictionary of rewards

The function gets the first answer to a prompt as an argument. It yields a message of the user, or results of tools, and
gets the next answer. Its return value is the reward of the episode. Messages count in `rollout.max_new_tokens`, and
they are context: only the tokens that the policy sampled are trained on.

The next prompt contains the tokens of earlier answers as they were sampled, because other tokens of the same text would
have other probabilities.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine import Engine, Generation, Generator, Sampling
from pipeline import progress
from pipeline.data.microbatches import gather_by_index
from pipeline.data.records import Message, Row
from pipeline.data.tokenizer import ChatTokenizer
from pipeline.errors import UserError
from pipeline.evaluation.judge import raise_on_all_ranks
from pipeline.evaluation.user_function import Dialogue, UserFunction

TURN_SEED = 1_000_003  # each turn has random numbers of its own


@dataclass(frozen=True)
class Episode(Generation):
    """All that follows a prompt: answers and messages. `logprobs` has one number per sampled token.

    sampled: whether the policy sampled each token; the others are messages
    text: the answers, with the messages as quotations
    rewards: the rewards by name
    """

    sampled: list[bool] = field(default_factory=list)
    text: str = ""
    rewards: dict[str, float] = field(default_factory=dict)


class _State:
    """An episode that is being played."""

    def __init__(self, prompt: Sequence[int], dialogue: Dialogue, longest: int) -> None:
        self.prompt, self.dialogue, self.longest = prompt, dialogue, longest
        self.token_ids: list[int] = []
        self.sampled: list[bool] = []
        self.logprobs: list[float] = []
        self.texts: list[str] = []
        self.finished = False

    @property
    def context(self) -> list[int]:
        return [*self.prompt, *self.token_ids]

    @property
    def left(self) -> int:
        """How many tokens may follow."""
        return self.longest - len(self.token_ids)

    def add_answer(self, answer: Generation, text: Callable[[list[int]], str]) -> None:
        ids = answer.token_ids[: self.left]
        self.finished = answer.finished and len(ids) == len(answer.token_ids)
        self._add(ids, sampled=True)
        self.logprobs += answer.logprobs[: len(ids)]
        self.texts.append(text(ids))

    def add_messages(self, messages: Sequence[Message], ids: Sequence[int]) -> bool:
        """Add messages, if a token is left for the answer to them. Return whether they were added."""
        if not self.finished or len(ids) >= self.left:
            self.finished = False
            return False
        self._add(ids, sampled=False)
        self.texts.append("\n".join(f"> {line}" for message in messages for line in message.content.splitlines()))
        return True

    def _add(self, ids: Sequence[int], *, sampled: bool) -> None:
        self.token_ids += ids
        self.sampled += [sampled] * len(ids)

    def episode(self) -> Episode:
        text = "\n\n".join(self.texts)
        return Episode(self.token_ids, self.logprobs, self.finished, self.sampled, text, self.dialogue.rewards)


def play_episodes(
    engine: Engine,
    function: UserFunction,
    tokenizer: ChatTokenizer,
    prompts: Sequence[list[int]],
    rows: Sequence[Row],
    settings: Sequence[Sampling],
    *,
    first_seed: int = 0,
    batch_size: int = 64,
    keep: bool,
    park_optimizer: bool = False,
) -> list[list[Episode]]:
    """Play one episode per prompt for each of the settings, and return all episodes on every rank.

    The ranks divide the prompts among them. Episode i uses the sample seed `first_seed` + i on any number of ranks.
    Raises SharedError on every rank if the function fails on any rank.
    """
    failure: UserError | None = None
    local: list[dict[int, Episode]] = [{} for _ in settings]
    with engine.generating(keep=keep, park_optimizer=park_optimizer) as generator, progress.own().user_calls():
        indices = engine.flip.assign([len(prompt) for prompt in prompts])
        try:
            for played, sampling in zip(local, settings, strict=True):
                states = [_State(prompts[i], Dialogue(function, rows[i]), sampling.max_new_tokens) for i in indices]
                seeds = [first_seed + i for i in indices]
                _play(generator, function, tokenizer, states, sampling, seeds, batch_size)
                played |= {i: state.episode() for i, state in zip(indices, states, strict=True)}
        except UserError as problem:
            failure = problem
        raise_on_all_ranks(failure)
    return [gather_by_index(played) for played in local]


def _play(
    generator: Generator,
    function: UserFunction,
    tokenizer: ChatTokenizer,
    states: Sequence[_State],
    sampling: Sampling,
    seeds: Sequence[int],
    batch_size: int,
) -> None:
    active, turn = list(range(len(states))), 0
    while active:
        of_turn = replace(sampling, seed=sampling.seed + turn * TURN_SEED)
        for group in _groups([(len(states[i].context), states[i].left) for i in active]):
            chosen = [active[at] for at in group]
            new_tokens = max(states[i].left for i in chosen)
            answers = generator.generate(
                [states[i].context for i in chosen],
                replace(of_turn, max_new_tokens=new_tokens, min_new_tokens=min(sampling.min_new_tokens, new_tokens)),
                [seeds[i] for i in chosen],
                batch_size,
                text=tokenizer.decode_unstripped,
            )
            for i, answer in zip(chosen, answers, strict=True):
                states[i].add_answer(answer, lambda ids: tokenizer.decode(ids, sampling.stop))
        messages = function.map(Dialogue.reply, [(states[i].dialogue, states[i].texts[-1]) for i in active])
        continued, ended = list[int](), list[int]()
        for i, turn_messages in zip(active, messages, strict=True):
            if turn_messages is not None:
                end = [] if states[i].token_ids[-1] in tokenizer.end_ids else [tokenizer.end_id]  # after a stop string
                ids = [*end, *tokenizer.encode_messages(turn_messages)]
                (continued if states[i].add_messages(turn_messages, ids) else ended).append(i)
        function.map(Dialogue.reply, [(states[i].dialogue, None) for i in ended])
        active, turn = continued, turn + 1


def _groups(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Divide sequences, each with (its tokens, the tokens that may follow), into groups that the model can continue.

    A group decodes with the largest number of new tokens in it. No sequence of a group becomes longer by that than the
    longest sequence may become, so that all fit into the positions of the model.
    """
    longest = max(tokens + left for tokens, left in sizes)
    groups: list[list[int]] = []
    for at in sorted(range(len(sizes)), key=lambda at: -sizes[at][1]):
        group = next((group for group in groups if sizes[at][0] + sizes[group[0]][1] <= longest), None)
        if group is None:
            groups.append([at])
        else:
            group.append(at)
    return groups
