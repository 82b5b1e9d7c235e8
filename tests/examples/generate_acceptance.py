"""Check that a transformers model generates the same tokens with its own attention and with strobe over a paged cache.

    python -m tests.examples.generate_acceptance

On a GPU the model has 0.7 billion weights; on a CPU it is tiny, and the run takes seconds. Both runs use the same
random weights and prompts of different lengths, and decode greedily. The model's own attention pads prompts on the left
and appends keys to a growing cache. strobe gets packed prompts and keeps keys in pages, allocated in random order and
NaN until written. On a GPU a decode step is captured once and replayed while lengths grow.

Tokens must be equal, except after ties. Let e be the largest difference between the logits of the model's own attention
and those of the same model in float64 (except norms and rotary angles, which transformers keeps in float32). strobe's
error may be twice as large (docs/contract.md). So where the two choose different tokens, their float64 logits must
differ by at most 4 e. Otherwise this exits with 1. After a tie a sequence is no longer compared. The output states how
many tokens were compared and how many near-ties there were. Errors in strobe.last_errors also fail the run.

Appends to OUT/generate.jsonl: one line per attention and one with the verdict. Needs
strobe-attention[bench,transformers].
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from importlib.resources import files
from inspect import signature
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import strobe
from strobe.bench.run import circumstances

# the argument through which models take a cache; the earlier name is deprecated
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
BYTES = 256  # vocabulary: text is read and written bytewise


class Size(NamedTuple):
    layers: int
    heads: int
    heads_kv: int
    head_dim: int
    page_size: int
    prompts: tuple[int, ...]  # prompt lengths
    new: int  # tokens to generate per prompt


SIZES = {
    "cuda": Size(12, 16, 4, 128, 64, tuple(range(1, 2048, 65)), 128),
    "cpu": Size(3, 8, 2, 32, 16, (1, 16, 33, 250), 48),
}


def model_of(size: Size, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights scaled so that attention is selective. With nearly uniform attention, as default
    initialisation gives, a model repeats itself regardless of its prompt.
    """
    width = size.heads * size.head_dim
    config = LlamaConfig(
        vocab_size=BYTES, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads_kv, head_dim=size.head_dim, max_position_embeddings=max(size.prompts) + size.new,
        initializer_range=1.6 * width**-0.5, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()


class Own:
    name, implementation, plan = "sdpa, dynamic cache", "sdpa", {"kernel": "torch", "config": None}

    def __init__(self, model: Any, prompts: list[Tensor], size: Size):
        self.model, self.prompts = model, pad_sequence(prompts, batch_first=True, padding_side="left")
        self.seen = pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side="left")

    def empty(self) -> None:
        self.cache, self.mask, self.logits = DynamicCache(config=self.model.config), self.seen, []

    def prefill(self) -> Tensor:
        return self.read(self.prompts, (self.mask.cumsum(1) - 1).clamp(min=0))

    def step(self) -> Tensor:
        self.mask = nn.functional.pad(self.mask, (0, 1), value=1)
        return self.read(self.token[:, None], self.mask.sum(1, keepdim=True) - 1)

    def read(self, ids: Tensor, positions: Tensor) -> Tensor:
        more = {CACHE: self.cache, "use_cache": True, "logits_to_keep": 1}
        self.logits.append(self.model(ids, attention_mask=self.mask, position_ids=positions, **more).logits[:, 0])
        self.token = self.logits[-1].argmax(-1)
        return self.token


# ---------------------------------------------------------------- strobe over a paged cache


class Paged:
    """strobe over a paged cache. No tensor moves, no shape depends on lengths and nothing synchronises, so a step can
    be captured as a CUDA graph and replayed.
    """

    name, implementation = "strobe, paged", "strobe_paged"

    def __init__(self, model: Any, prompts: list[Tensor], size: Size):
        device, lengths = model.device, [len(prompt) for prompt in prompts]
        self.model, self.ids = model, torch.cat(prompts)[None]
        self.positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        self.bounds = list(accumulate(lengths, initial=0))
        self.offsets = torch.tensor(self.bounds, dtype=torch.int32, device=device)
        need = [math.ceil((n + size.new - 1) / size.page_size) for n in lengths]  # the last token's key is never read
        dealt = torch.randperm(sum(need), generator=torch.Generator().manual_seed(1)).int().split(need)
        # reading page -1 would be reported
        self.table = pad_sequence(dealt, batch_first=True, padding_value=-1).to(device)
        shape = size.layers, 2, sum(need), size.page_size, size.heads_kv, size.head_dim
        self.pools = torch.empty(shape, dtype=model.dtype, device=device)
        # each sequence's number of keys before and after a call
        self.start, self.stop = self.offsets.diff(), self.offsets.diff()
        self.token = torch.zeros_like(self.start, dtype=torch.long)
        self.choice = strobe.explain_decode(
            self.pools.new_empty(len(prompts), 1, size.heads, size.head_dim), self.cache(0, self.stop)
        )
        self.plan = {"kernel": self.choice.forward.kernel.name, "config": str(self.choice.forward.config)}

    def cache(self, layer: int, lengths: Tensor, rows: slice = slice(None)) -> strobe.PagedCache:
        return strobe.PagedCache(*self.pools[layer], self.table[rows], lengths[rows])

    def empty(self) -> None:
        self.pools.fill_(math.nan)
        self.start.zero_()
        self.stop.copy_(self.offsets.diff())

    def prefill(self) -> Tensor:
        more = {"logits_to_keep": self.offsets[1:] - 1, "use_cache": False, "paged": self, "packed": True}
        return self.token.copy_(self.model(self.ids, position_ids=self.positions, **more).logits[0].argmax(-1))

    def step(self) -> Tensor:
        self.start.copy_(self.stop)
        self.stop.add_(1)
        more = {"use_cache": False, "paged": self, "packed": False}
        return self.token.copy_(
            self.model(self.token[:, None], position_ids=self.start[:, None].long(), **more).logits[:, 0].argmax(-1)
        )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    paged: Paged,
    packed: bool,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer, with query, key and value [B, H, S, D]. Other
    keywords of the model call arrive here too.
    """
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if not packed:  # one token per sequence
        strobe.append(paged.cache(module.layer_idx, paged.start), k, v)
        return strobe.attention_decode(q, paged.cache(module.layer_idx, paged.stop), scale=scaling), None
    for row, (start, stop) in enumerate(pairwise(paged.bounds)):
        strobe.append(
            paged.cache(module.layer_idx, paged.start, slice(row, row + 1)), k[:, start:stop], v[:, start:stop]
        )
    return strobe.attention_varlen(q[0], k[0], v[0], cu_seqlens_q=paged.offsets, causal=True, scale=scaling)[None], None


# no mask function is registered under this name, so transformers builds no masks
AttentionInterface.register(Paged.implementation, attention)


class Replayed(Paged):
    name, graph = "strobe, paged, CUDA graph", None

    def empty(self) -> None:
        if self.graph is None:
            aside, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                super().step()  # compiles kernels and creates handles, which a capture cannot
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(self.graph):
                super().step()
        super().empty()

    def step(self) -> Tensor:
        self.graph.replay()
        return self.token


# ---------------------------------------------------------------- generation, verdict, command


def write(writer: Own | Paged, new: int) -> tuple[Tensor, float, float]:
    """(tokens [B, new], milliseconds for the prompts, tokens per second after them)."""
    wait = torch.cuda.synchronize if writer.model.device.type == "cuda" else lambda: None
    writer.model.set_attn_implementation(writer.implementation)
    writer.empty()
    wait()
    began = time.perf_counter()
    tokens = [writer.prefill().clone()]
    wait()
    between = time.perf_counter()
    tokens += [writer.step().clone() for _ in range(new - 1)]
    wait()
    return torch.stack(tokens, 1), 1e3 * (between - began), (new - 1) * len(tokens[0]) / (time.perf_counter() - between)


def compare_tokens(own: Own, prompts: list[Tensor], theirs: Tensor, ours: Tensor) -> dict[str, Any]:
    """Apply the criterion of the module's docstring. theirs [B, new]: tokens that `own` has just written; ours [runs,
    B, new].
    """
    exact = copy.deepcopy(own.model).double()
    exact.set_attn_implementation(own.implementation)
    whole = (torch.cat([prompt, tokens[:-1]])[None] for prompt, tokens in zip(prompts, theirs))
    # [B, new, BYTES]
    logits = torch.cat([exact(ids, use_cache=False, logits_to_keep=theirs.shape[1]).logits for ids in whole])
    rounding = 4 * (torch.stack(own.logits, 1) - logits).abs().max().item()
    differs, gaps = (
        theirs != ours,
        torch.stack([logits.gather(2, torch.stack([theirs, tokens], 2)).diff()[..., 0].abs() for tokens in ours]),
    )
    parts = differs & (differs.cumsum(2) == 1)
    # up to the first difference; a NaN gap is wrong
    compared, wrong = differs.cumsum(2) == parts, parts & ~(gaps <= rounding)
    close = -logits.topk(2).values.diff() <= rounding
    masks = {"compared": compared, "ties": parts & ~wrong, "wrong": wrong, "close": close}
    counts = {"tokens": ours.numel(), **{name: int(mask.sum()) for name, mask in masks.items()}}
    known, errors = math.isfinite(rounding), strobe.last_errors(ours.device)  # JSON has no NaN
    equal = known and not counts["wrong"] and not errors
    return {"equal": equal, **counts, "rounding": float(f"{rounding:.2g}") if known else None, "errors": errors}


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device, console = torch.device(options.device), Console(stderr=True)
    torch.set_num_threads(1)  # more threads do not help a model this small
    size = SIZES[device.type]._replace(**({"new": options.new} if options.new else {}))
    model, facts = model_of(size, device, getattr(torch, options.dtype)), circumstances(device)
    text = files("examples.demo.text").joinpath("alice.txt").read_bytes()
    prompts = [torch.tensor(list(text[2000 * i : 2000 * i + n]), device=device) for i, n in enumerate(size.prompts)]
    own, *paged = writers = [
        kind(model, prompts, size) for kind in (Own, Paged, Replayed)[: 3 if device.type == "cuda" else 2]
    ]
    console.print(str(paged[0].choice), highlight=False, soft_wrap=True)
    strobe.last_errors(device)  # clear earlier errors
    found = [
        [write(writer, size.new) for writer in writers]
        for _ in track(range(1 + options.rounds), "rounds", console=console, transient=True)
    ]
    verdict = compare_tokens(own, prompts, found[-1][0][0], torch.stack([run[0] for runs in found for run in runs[1:]]))
    table = Table(
        "attention", "prompts, ms", "tokens a second", title=f"{model.num_parameters():,} weights, {options.dtype}"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "generate.jsonl").open("a") as file:
        line = lambda row: file.write(
            json.dumps({"case": "generate", **row, "dtype": options.dtype, **size._asdict(), **facts}) + "\n"
        )
        for writer, runs in zip(writers, zip(*found[1:])):  # the first run compiles and is not counted
            figures = {
                name: round(median(run[i] for run in runs), 1) for i, name in ((1, "prompts_ms"), (2, "tokens_per_s"))
            }
            line({"attention": writer.name, **writer.plan, **figures, "rounds": options.rounds})
            table.add_row(writer.name, *map(str, figures.values()))
        line(verdict)
    console.print(
        table, ", ".join(f"{name} {value}" for name, value in verdict.items()), highlight=False, soft_wrap=True
    )
    return 0 if verdict["equal"] else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        choices=tuple(SIZES),
        help="default cuda if there is a GPU",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="default float32; bfloat16 is faster and has many ties",
    )
    parser.add_argument("--new", type=int, help="tokens per prompt (default 128 on a GPU, 48 on a CPU)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="timed runs per attention (default 3), after one that compiles"
    )
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of generate.jsonl (default results)")
    options = parser.parse_args(arguments)
    for name, least in (("new", 2), ("rounds", 1)):
        if getattr(options, name) is not None and getattr(options, name) < least:
            parser.error(f"--{name}: got {getattr(options, name)}, expected at least {least}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
