"""One decode step of many sequences of which the host learns nothing: fixed shapes, fixed addresses, no number read.

What a step needs lies on the device, a row a slot (`DecodeState`): the token drawn last, how many are cached, the
random stream, how many were drawn and may be, whether the answer ended. A step takes the rows of its slots, runs the
model's forward (`forwards.py`) with attention over the slot cache, draws, tests for the end, and writes the rows back.
So a CUDA graph can replay it, and run eagerly on any device it says the same.

The last slot of cache and state is scratch: rows that only fill a step up to its size point there.
"""

import torch
from torch import Tensor

from engine.kernels import sample
from engine.rollout.cache.slots import SlotCache
from engine.rollout.on_device.attention import Queries
from engine.rollout.on_device.forwards import Forwards
from engine.rollout.sampling import Sampling, penalise

TOKEN, CACHED, STREAM, DRAWN, LIMIT, ENDED = range(6)  # columns of DecodeState.rows
NOTHING = -1  # said by a row whose answer had ended before


class DecodeState:
    """What the device knows of `slots` sequences, and what it said in the last `places` steps.

    rows (slots + 1, 6) int64; said (places, slots + 1) int64 tokens and logprobs fp32, NOTHING where none was drawn;
    place () int64 is the next of them.
    """

    def __init__(self, slots: int, places: int, device: torch.device) -> None:
        self.rows = torch.zeros(slots + 1, 6, dtype=torch.int64, device=device)
        self.said = torch.zeros(places, slots + 1, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(places, slots + 1, dtype=torch.float32, device=device)
        self.place = torch.zeros((), dtype=torch.int64, device=device)
        self.rows[:, ENDED].fill_(1)

    @property
    def scratch(self) -> int:
        """The slot that fills steps up."""
        return self.rows.shape[0] - 1

    def begin(self) -> None:
        """Forget what was said."""
        self.said.fill_(NOTHING)
        self.place.zero_()

    def say(self, slots: Tensor, tokens: Tensor, logprobs: Tensor) -> None:
        """Note what slots (b,) said, and go on to the next place."""
        at = self.place * self.said.shape[1] + slots
        self.said.view(-1).index_copy_(0, at, tokens)
        self.logprobs.view(-1).index_copy_(0, at, logprobs)
        self.place.add_(1)


class StaticStep:
    """A decode step under fixed sampling settings; calling it runs one for slots (b,) int64.

    The settings' seed is not read: streams come shifted by it (`sampling.under_seed`), so that a step serves any.
    """

    def __init__(
        self, forwards: Forwards, cache: SlotCache, state: DecodeState, how: Sampling, vocabulary: int
    ) -> None:
        self.forwards, self.cache, self.state, self.how = forwards, cache, state, how
        device = state.rows.device
        self.ends = torch.tensor(how.end_ids, dtype=torch.int64, device=device)
        self.seen: Tensor | None = None  # (slots + 1, V), for the repetition penalty
        self.early: Tensor | None = None  # (V,), what is not drawn before the shortest answer stands
        if how.repetition_penalty != 1:
            self.seen = torch.zeros(state.rows.shape[0], vocabulary, dtype=torch.bool, device=device)
        if how.min_new_tokens > 0 and how.end_ids:
            self.early = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self.early.index_fill_(0, self.ends, True)

    def prepare(self, rows: int) -> None:
        """Let steps of `rows` rows take what they may wait for."""
        self.forwards.prepare(rows, self.cache)

    @torch.inference_mode()
    def __call__(self, slots: Tensor) -> None:
        told = self.state.rows.index_select(0, slots)
        live = 1 - told[:, ENDED]
        positions = told[:, CACHED]
        queries = Queries(self.cache, slots, positions, (positions + 1) * live)
        logits = self.forwards(told[None, :, TOKEN], positions[None], queries)
        told[:, CACHED].add_(live)
        self.draw(slots, told, logits[0])

    @torch.inference_mode()
    def draw(self, slots: Tensor, told: Tensor, logits: Tensor) -> None:
        """Draw the next token of slots (b,), of which told (b, 6) is known, from logits (b, V); write all of it."""
        streams, drawn = told[:, STREAM].contiguous(), told[:, DRAWN].contiguous()
        if self.early is not None:
            logits = logits.masked_fill(self.early & (drawn < self.how.min_new_tokens)[:, None], float("-inf"))
        if self.seen is not None:
            logits = penalise(logits, self.seen.index_select(0, slots), self.how.repetition_penalty)
        tokens, logprobs = sample(logits, streams, drawn, self.how)
        if self.seen is not None:
            self.seen.view(-1).index_fill_(0, slots * self.seen.shape[1] + tokens, True)
        live = told[:, ENDED] == 0
        drawn = drawn + live
        over = (tokens[:, None] == self.ends).any(1) | (drawn >= told[:, LIMIT]) | ~live
        rows = torch.stack([tokens, told[:, CACHED], streams, drawn, told[:, LIMIT], over.long()], 1)
        self.state.rows.index_copy_(0, slots, rows)
        self.state.say(slots, torch.where(live, tokens, NOTHING), logprobs)
