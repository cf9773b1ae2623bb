"""One decode step of many sequences of which the host learns nothing: fixed shapes, fixed addresses, no number read.

What a step needs lies on the device, a row a slot (`DecodeState`; `engine/kernels/decode_rows.py` says what is in it).
A step takes the rows of its slots, runs the model's forward (`forwards.py`) with attention over the slot caches, draws,
tests for the end, and writes the rows back. So a CUDA graph can replay it, and run eagerly on any device it says the
same.

The last slot for answers is scratch: rows that only fill a step up to its size point there.
"""

import torch
from torch import Tensor

from engine.generation.on_device.attention import Queries
from engine.generation.on_device.caches import Caches
from engine.generation.on_device.forwards import Forwards
from engine.generation.sampling import Sampling, penalise
from engine.kernels import note_rows, sample, take_rows
from engine.kernels.decode_rows import COLUMNS, DRAWN, ENDED, NOTHING, STREAM, Said

BEFORE = -1  # the place before the first


class DecodeState:
    """What the device knows of `slots` sequences, and what it said in the last `places` steps.

    rows (slots + 1, 8) int64; said: tokens (places, slots + 1) and their log-probabilities, NOTHING where none was
    drawn, and the place that was written last.
    """

    def __init__(self, slots: int, places: int, device: torch.device) -> None:
        self.rows = torch.zeros(slots + 1, len(COLUMNS), dtype=torch.int64, device=device)
        self.said = Said(
            torch.zeros(places, slots + 1, dtype=torch.int64, device=device),
            torch.zeros(places, slots + 1, dtype=torch.float32, device=device),
            torch.full((), BEFORE, dtype=torch.int64, device=device),
        )
        self.rows[:, ENDED].fill_(1)

    @property
    def scratch(self) -> int:
        """The slot that fills steps up."""
        return self.rows.shape[0] - 1

    def begin(self) -> None:
        """Forget what was said."""
        self.said.tokens.fill_(NOTHING)
        self.said.place.fill_(BEFORE)


class StaticStep:
    """A decode step under fixed sampling settings; calling it runs one for chosen (2, b) int64: slots, and of each row
    the first of its neighbours that read the same prompt.

    `joined` steps read a prompt once for all of these. The settings' seed is not read: streams come shifted by it
    (`sampling.under_seed`), so that a step serves any.
    """

    def __init__(
        self, forwards: Forwards, caches: Caches, state: DecodeState, how: Sampling, vocabulary: int, *, joined: bool
    ) -> None:
        self.forwards, self.caches, self.state, self.how, self.joined = forwards, caches, state, how, joined
        device = state.rows.device
        self.ends = torch.tensor(how.end_ids, dtype=torch.int64, device=device)
        self.seen: Tensor | None = None  # (slots + 1, V), for the repetition penalty
        self.early: Tensor | None = None  # (V,), what is not drawn before the shortest answer stands
        if how.repetition_penalty != 1:
            self.seen = torch.zeros(state.rows.shape[0], vocabulary, dtype=torch.bool, device=device)
        if how.min_new_tokens > 0 and how.end_ids:
            self.early = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self.early.index_fill_(0, self.ends, True)

    @torch.inference_mode()
    def __call__(self, chosen: Tensor) -> None:
        slots = chosen[0]
        told = take_rows(self.state.rows, slots, self.state.said.place)
        firsts = chosen[1] if self.joined else None
        queries = Queries(self.caches, slots, told.places, told.lengths, told.prompts, told.shared, firsts)
        logits = self.forwards(told.tokens[None], told.positions[None], queries)
        self._draw(slots, told.streams, told.drawn, logits[0])

    @torch.inference_mode()
    def begin(self, slots: Tensor, rows: Tensor) -> None:
        """Take sequences into slots (n,), of which rows (n, 8) are known."""
        self.state.rows.index_copy_(0, slots, rows)

    @torch.inference_mode()
    def draw(self, slots: Tensor, rows: Tensor, logits: Tensor) -> None:
        """Take in sequences whose last token was just run, and draw the next one from its logits (n, V)."""
        self.begin(slots, rows)
        self.state.said.place.add_(1)
        self._draw(slots, rows[:, STREAM].contiguous(), rows[:, DRAWN].contiguous(), logits)

    def _draw(self, slots: Tensor, streams: Tensor, drawn: Tensor, logits: Tensor) -> None:
        if self.early is not None:
            logits = logits.masked_fill(self.early & (drawn < self.how.min_new_tokens)[:, None], float("-inf"))
        if self.seen is not None:
            logits = penalise(logits, self.seen.index_select(0, slots), self.how.repetition_penalty)
        tokens, logprobs = sample(logits, streams, drawn, self.how)
        note_rows(self.state.rows, slots, tokens, logprobs, self.ends, self.state.said, self.seen)
