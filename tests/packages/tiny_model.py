"""A tiny random model, and a scheduler that batches requests as engines do: chunks of prompts beside single tokens,
over pages of a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import strobe

VOCABULARY, HIDDEN, HEADS, HEADS_KV, HEAD_DIM, LAYERS = 61, 48, 4, 2, 16, 2
BLOCK, BLOCKS, MOST_BLOCKS = 16, 24, 6
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v [T, heads, D] -> [T, heads_q, D]


@dataclass(frozen=True)
class Options:
    """Options of a model's layers. window: the number of keys that a row sees, its own included."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    slopes: tuple[float, ...] | None = None  # of ALiBi, one for each query head


class TinyModel(nn.Module):
    """Two layers of attention between embeddings of tokens and positions and the next token's logits, in float32."""

    def __init__(self, options: Options, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: torch.randn(*shape, generator=generator)
        self.options = options
        self.embeddings, self.positions = draw(VOCABULARY, HIDDEN), draw(200, HIDDEN) / 2
        widths = (HEADS + 2 * HEADS_KV) * HEAD_DIM
        self.qkv = [draw(HIDDEN, widths) / HIDDEN**0.5 * 1.5 for _ in range(LAYERS)]
        self.out = [draw(HEADS * HEAD_DIM, HIDDEN) / HIDDEN**0.5 for _ in range(LAYERS)]
        self.sinks = [draw(HEADS) for _ in range(LAYERS)] if options.sinks else [None] * LAYERS

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Logits [T, vocabulary] of packed tokens."""
        x = self.embeddings[tokens] + self.positions[positions]
        for layer in range(LAYERS):
            normal = nn.functional.rms_norm(x, (HIDDEN,))
            parts = (normal @ self.qkv[layer]).split([HEADS * HEAD_DIM, *[HEADS_KV * HEAD_DIM] * 2], -1)
            q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in parts)
            x = x + attend(layer, q, k, v).reshape(len(tokens), -1) @ self.out[layer]
        return nn.functional.rms_norm(x, (HIDDEN,)) @ self.embeddings.T

    def dense(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of one sequence by its definition, in float64."""
        q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(HEADS // HEADS_KV, 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) * HEAD_DIM**-0.5
        if self.options.softcap:
            scores = self.options.softcap * torch.tanh(scores / self.options.softcap)
        if self.options.slopes is not None:
            back = torch.arange(len(q[0]))[:, None] - torch.arange(len(q[0]))
            scores = scores - torch.tensor(self.options.slopes).double()[:, None, None] * back.abs()
        distance = torch.arange(len(q[0]))[:, None] - torch.arange(len(q[0]))
        seen = distance >= 0
        if self.options.window is not None:
            seen &= distance < self.options.window
        scores = scores.masked_fill(~seen, -torch.inf)
        sinks = self.sinks[layer]
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        weights = scores.softmax(-1)[..., : k.shape[1]]
        return (weights @ v).transpose(0, 1).float()


def prompts(count: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = (5, 37, 1, 18, 50, 9, 26)[:count]
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def generated(model: TinyModel, prompt: list[int], new: int) -> list[int]:
    """Greedy tokens by dense attention over the whole sequence."""
    tokens = list(prompt)
    for _ in range(new):
        ids = torch.tensor(tokens)
        tokens.append(int(model(ids, torch.arange(len(ids)), model.dense)[-1].argmax()))
    return tokens[len(prompt) :]


class Step(NamedTuple):
    """One batch: `news` tokens of each request, packed, and the blocks that hold all of its keys."""

    requests: list[int]
    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    news: list[int]
    lengths: list[int]  # keys of each request, the new ones included
    table: Tensor  # int32 [B, MOST_BLOCKS]
    slots: Tensor  # int64 [T]


def compare_8_bits(model: TinyModel, step: Step, logits: Tensor, scale: float) -> None:
    """Compare one step of whole prompts over an 8-bit cache with a model that rounds keys and values the same way."""

    def rounded(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = ((t / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale for t in (k, v))
        return model.dense(layer, q, k, v)

    for begin, end in pairwise([0, *torch.tensor(step.news).cumsum(0).tolist()]):
        exact = model(step.tokens[begin:end], step.positions[begin:end], rounded)
        torch.testing.assert_close(logits[begin:end], exact, rtol=2e-4, atol=2e-4)


def entry_point(package: str, group: str) -> object:
    """The function that a package's entry point `strobe` names."""
    tomllib = pytest.importorskip("tomllib")
    text = (Path(__file__).parents[2] / "packages" / package / "pyproject.toml").read_text()
    module, _, name = tomllib.loads(text)["project"]["entry-points"][group]["strobe"].partition(":")
    return getattr(__import__(module), name)


class Scheduler:
    """Continuous batching: at most `most` requests at a time, prompts in chunks, finished requests free their blocks.

    With a window, blocks that no later token sees are freed, too. Their table entries become block 0, which no request
    owns.
    """

    def __init__(self, requests: list[list[int]], new: int, most: int = 4, chunk: int = 16, window: int | None = None):
        self.sequences = [list(request) for request in requests]
        self.limits = [len(request) + new for request in requests]
        self.prompts = [len(request) for request in requests]
        self.held = [0] * len(requests)  # keys in the cache
        self.blocks: dict[int, list[int]] = {}
        self.free, self.waiting = list(range(BLOCKS - 1, 0, -1)), list(range(len(requests)))
        self.most, self.chunk, self.window = most, chunk, window
        self.freed: list[int] = []  # blocks that became free in the last step

    def steps(self) -> Iterator[Step]:
        while self.waiting or self.blocks:
            while self.waiting and len(self.blocks) < self.most:
                self.blocks[self.waiting.pop(0)] = []
            yield self._step(list(self.blocks))

    def _step(self, requests: list[int]) -> Step:
        tokens, positions, news, lengths, slots = [], [], [], [], []
        table = torch.zeros(len(requests), MOST_BLOCKS, dtype=torch.int32)
        for row, n in enumerate(requests):
            begin = self.held[n]
            part = self.sequences[n][begin : begin + self.chunk]
            stop = begin + len(part)
            blocks = self.blocks[n]
            while len(blocks) * BLOCK < stop:
                blocks.append(self.free.pop())
            table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            tokens += part
            positions += range(begin, stop)
            slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(begin, stop)]
            news.append(len(part))
            lengths.append(stop)
        return Step(requests, *map(torch.tensor, (tokens, positions)), news, lengths, table, torch.tensor(slots))

    def compare(self, step: Step, logits: Tensor, model: TinyModel) -> None:
        """Compare the logits of each request's last token with dense attention over the whole sequence."""
        for n, length, end in zip(step.requests, step.lengths, torch.tensor(step.news).cumsum(0).tolist()):
            exact = model(torch.tensor(self.sequences[n][:length]), torch.arange(length), model.dense)[-1]
            torch.testing.assert_close(logits[end - 1], exact, rtol=1e-4, atol=1e-4)

    def serve(
        self,
        model: TinyModel,
        run: Callable[[Step], Tensor],
        on_freed: Callable[[list[int]], None] = lambda blocks: None,
    ) -> None:
        """Run all steps, and compare each step's logits with dense attention. on_freed receives freed blocks."""
        for step in self.steps():
            logits = run(step)
            self.compare(step, logits, model)
            self.take(step, logits)
            on_freed(self.freed)
        assert strobe.last_errors() == []

    def compare_tokens(self, model: TinyModel) -> None:
        """Compare the tokens of all requests with greedy generation by dense attention."""
        for n, (count, limit) in enumerate(zip(self.prompts, self.limits)):
            assert self.written(n) == generated(model, self.sequences[n][:count], limit - count), n

    def take(self, step: Step, logits: Tensor) -> None:
        """Write the next token of each request whose tokens are all in the cache."""
        self.freed, ends = [], torch.tensor(step.news).cumsum(0).tolist()
        for n, length, end in zip(step.requests, step.lengths, ends):
            self.held[n] = length
            if length == len(self.sequences[n]):
                self.sequences[n].append(int(logits[end - 1].argmax()))
            if len(self.sequences[n]) == self.limits[n] + 1 or length + 1 > self.limits[n]:
                self._release(self.blocks.pop(n))
            elif self.window is not None:
                unseen = max(0, length - self.window + 1) // BLOCK
                blocks = self.blocks[n]
                self._release([block for block in blocks[:unseen] if block])
                blocks[:unseen] = [0] * unseen

    def _release(self, blocks: list[int]) -> None:
        own = [block for block in blocks if block]
        self.freed += own
        self.free = own + self.free  # the block that has been free longest is allocated first

    def written(self, n: int) -> list[int]:
        return self.sequences[n][self.prompts[n] : self.limits[n]]
