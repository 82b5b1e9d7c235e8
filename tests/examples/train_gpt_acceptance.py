"""Train a small GPT with strobe's attention and with PyTorch's, and test whether the losses differ by more than noise.

    python -m tests.examples.train_gpt_acceptance
    python -m tests.examples.train_gpt_acceptance --device cpu --steps 100 --seeds 5 --out /tmp/run

On a GPU it trains for 300 steps, about a minute; on a CPU a tiny model for 30 steps.

Each seed has its own initial weights and batches, which both attentions share. The two compute the same function up to
rounding. Training amplifies small differences, so the loss curves may diverge, but by no more than curves of different
seeds.

The criterion: losses are averaged over the preceding tenth of the run. The means over n seeds of runs that differ only
in their seeds differ by s * sqrt(2 / n) (root mean square), where s is the standard deviation over seeds. strobe and
PyTorch count as equal if their means differ by at most twice that at *every* step. s comes from PyTorch's runs alone
and is averaged over the same tenth, so that a step at which seeds coincide does not make it zero. Equal attentions
share weights and batches and stay far below the limit. An effect smaller than a change of seed is not detected; 300
steps on a GPU detect more than 30 steps of the tiny model. Exits with 1 if the two are not equal.

`--save-qkv FILE` saves the inputs of the trained model's attention; `strobe bench forward --data FILE` measures on
them.

Appends to OUT/train_gpt.jsonl (one line per run and one with the verdict) and writes OUT/train_gpt.png. Needs
strobe-attention[bench].
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import strobe
from strobe.bench.run import circumstances

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [B, S, H, D] -> [B, S, H, D]
BYTES = 256  # vocabulary: text is read bytewise


def with_strobe(q: Tensor, k: Tensor, v: Tensor, do: Callable = strobe.attention) -> Any:
    """strobe's attention. On a CPU it passes plain calls to PyTorch's kernel, which would be compared with itself here;
    batch_invariant=True prevents that.
    """
    return do(q, k, v, causal=True, batch_invariant=q.device.type == "cpu")


def with_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {"sdpa": with_sdpa, "strobe": with_strobe}
COLOURS = {"sdpa": "#0072b2", "strobe": "#d1495b"}


class Size(NamedTuple):
    layers: int
    heads: int
    head_dim: int
    seqlen: int
    batch: int
    steps: int
    learning_rate: float


SIZES = {"cuda": Size(6, 6, 64, 1024, 16, 300, 1e-3), "cpu": Size(2, 2, 32, 64, 8, 30, 3e-3)}


# ---------------------------------------------------------------- the model


class Block(nn.Module):
    def __init__(self, size: Size, attend: Attention):
        super().__init__()
        width = size.heads * size.head_dim
        self.heads, self.attend = (3, size.heads, size.head_dim), attend
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, self.heads).unbind(2)  # [B, S, H, D] each, a view
        x = x + self.project(self.attend(q, k, v).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, size: Size, attend: Attention):
        super().__init__()
        width = size.heads * size.head_dim
        self.token, self.position = nn.Embedding(BYTES, width), nn.Embedding(size.seqlen, width)
        self.blocks = nn.Sequential(*(Block(size, attend) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position.weight)))


# ---------------------------------------------------------------- training


def batches(seed: int, size: Size, device: torch.device) -> Iterator[Tensor]:
    """Endless random passages [B, S + 1] of Alice's Adventures in Wonderland, which the demo contains."""
    text = (
        torch.frombuffer(bytearray(files("examples.demo.text").joinpath("alice.txt").read_bytes()), dtype=torch.uint8)
        .long()
        .to(device)
    )
    draw, passage = torch.Generator().manual_seed(seed), torch.arange(size.seqlen + 1, device=device)
    while True:
        starts = torch.randint(len(text) - size.seqlen, (size.batch, 1), generator=draw)
        yield text[starts.to(device) + passage]


def loss_of(model: GPT, passages: Tensor) -> Tensor:
    """Loss in nats per byte. On a GPU, matrix products and attention use bfloat16."""
    with torch.autocast(passages.device.type, torch.bfloat16, enabled=passages.is_cuda):
        return cross_entropy(model(passages[:, :-1]).flatten(0, 1), passages[:, 1:].flatten())


class Run(NamedTuple):
    losses: Tensor  # of every step, [steps]
    seconds: float
    model: GPT


def train(attend: Attention, seed: int, size: Size, device: torch.device, tell: Callable[[int, float], object]) -> Run:
    torch.manual_seed(seed)
    model = GPT(size, attend).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    rate = lambda step: (
        min(1.0, (step + 1) / (0.1 * size.steps)) * (0.55 + 0.45 * math.cos(math.pi * step / size.steps))
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses, began = [], time.perf_counter()
    for step, passages in zip(range(size.steps), batches(seed, size, device)):
        loss = loss_of(model, passages)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        if step % 10 == 9 or step + 1 == size.steps:  # reading a loss synchronises with the GPU
            tell(step + 1, loss.item())
    return Run(torch.stack(losses).double().cpu(), time.perf_counter() - began, model)


def save_qkv(model: GPT, size: Size, device: torch.device, path: Path) -> None:
    """Write q, k and v [layers * B, S, H, D] of a trained model's layers for one batch, for `strobe bench --data`."""
    held: list[tuple[Tensor, ...]] = []

    def keep(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held.append((q.detach(), k.detach(), v.detach()))
        return with_strobe(q, k, v)

    for block in model.blocks:
        block.attend = keep
    with torch.no_grad():
        loss_of(model, next(batches(0, size, device)))
    torch.save({name: torch.cat(parts).cpu() for name, parts in zip("qkv", zip(*held))}, path)


def kernels(size: Size, device: torch.device) -> strobe.Choice:
    """The kernels that strobe selects for the model's q, k and v. Raises an error if a GPU does not get GPU kernels."""
    seen: list[strobe.Choice] = []

    def look(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append(with_strobe(q, k, v, strobe.explain))
        return with_strobe(q, k, v)

    loss_of(GPT(size, look).to(device), next(batches(0, size, device)))
    choice = seen[0]
    wanted = (
        ("cpu",)
        if device.type == "cpu"
        else ("hopper",)
        if choice.target.capability == 90
        else ("blackwell", "portable")
    )
    chosen = {plan.kernel.name if plan else "none" for one in seen for plan in (one.forward, one.backward)}
    if not all(name.startswith(wanted) for name in chosen):
        raise RuntimeError(
            f"expected kernels of {' or '.join(wanted)} for all layers, forward and backward, got {chosen}:\n{choice}"
        )
    return choice


# ---------------------------------------------------------------- the verdict


def smooth(curves: Tensor, width: int) -> Tensor:
    """The moving average of [..., steps] over the last `width` steps, or over as many as there are."""
    total = nn.functional.pad(curves.cumsum(-1), (1, 0))
    stop = torch.arange(1, curves.shape[-1] + 1)
    start = (stop - width).clamp(min=0)
    return (total[..., stop] - total[..., start]) / (stop - start)


class Verdict(NamedTuple):
    curves: dict[str, Tensor]  # smoothed, [seeds, steps]
    band: Tensor  # [steps]: allowed difference of the means
    share: Tensor  # [steps]: actual difference relative to the band

    @property
    def equal(self) -> bool:
        return bool((self.share <= 1).all())  # false for NaN


def compare_losses(losses: dict[str, Tensor]) -> Verdict:
    """Apply the criterion of the module's docstring to the losses [seeds, steps] of each attention."""
    seeds, steps = losses["sdpa"].shape
    width = max(1, steps // 10)
    curves = {name: smooth(curve, width) for name, curve in losses.items()}
    spread = smooth(curves["sdpa"].var(0), width).sqrt()
    band = 2 * spread * math.sqrt(2 / seeds)
    return Verdict(curves, band, (curves["strobe"].mean(0) - curves["sdpa"].mean(0)).abs() / band)


def picture(verdict: Verdict, facts: dict[str, Any], path: Path) -> None:
    """Plot the means with PyTorch's band above, and their difference relative to the band below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained", dpi=150)
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 1))
    steps = torch.arange(1, len(verdict.band) + 1)
    middle = verdict.curves["sdpa"].mean(0)
    above.fill_between(
        steps,
        middle - verdict.band,
        middle + verdict.band,
        color=COLOURS["sdpa"],
        alpha=0.18,
        lw=0,
        label="noise band of the seeds",
    )
    for name, label, style in (("sdpa", "PyTorch SDPA", "-"), ("strobe", "strobe", (0, (4, 3)))):
        above.plot(steps, verdict.curves[name].T, color=COLOURS[name], linewidth=0.6, alpha=0.35)
        above.plot(
            steps,
            verdict.curves[name].mean(0),
            color=COLOURS[name],
            linewidth=2,
            linestyle=style,
            label=f"{label}, mean of seeds",
        )
    above.set_ylabel("loss, nats a byte")
    above.set_title(
        f"{'equal' if verdict.equal else 'not equal'} within the noise of {len(verdict.curves['sdpa'])} seeds",
        loc="left",
    )
    above.legend(frameon=False)
    below.axhline(1, color=COLOURS["sdpa"], linewidth=1, linestyle=":")
    below.set_yscale("log", nonpositive="mask")  # zero differences are not drawn
    below.plot(steps, verdict.share, ".", color="#333333", markersize=3)
    below.set_ylim(1e-7, max(10.0, 2 * verdict.share.nan_to_num(posinf=1).max().item()))
    below.set_ylabel("difference / band")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    where = (
        f"{facts['device'].split(', ')[0]} · torch {facts['torch']} · {facts['date'][:10]} · commit {facts['commit']}"
    )
    figure.supxlabel(where, fontsize=7, color="#666666")
    figure.savefig(path)


# ---------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device, console = torch.device(options.device), Console(stderr=True)
    if device.type == "cpu":
        # so small a model gains nothing from more, and beside other work their waiting makes it ten times slower
        torch.set_num_threads(1)
    size = SIZES[device.type]._replace(**({"steps": options.steps} if options.steps else {}))
    choice, facts, losses = kernels(size, device), circumstances(device), {name: [] for name in ATTENTIONS}
    console.print(str(choice), highlight=False, soft_wrap=True)
    names, configs = zip(*((plan.kernel.name, str(plan.config)) for plan in (choice.forward, choice.backward) if plan))
    plans = {
        "sdpa": {"kernel": "torch", "config": None},
        "strobe": {"kernel": ", ".join(names), "config": "; ".join(configs)},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with (options.out / "train_gpt.jsonl").open("a") as file, Progress(*columns, console=console) as progress:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps({"case": "train_gpt", **row, **size._asdict(), **facts}) + "\n")
            file.flush()

        for seed in range(options.seeds):
            for name, attend in ATTENTIONS.items():
                task = progress.add_task(f"{name} seed {seed}", total=size.steps, loss="")
                tell = lambda step, loss, task=task: progress.update(task, completed=step, loss=f"loss {loss:.3f}")
                run = train(attend, seed, size, device, tell)
                losses[name].append(run.losses)
                write(
                    {"attention": name, "seed": seed}
                    | plans[name]
                    | {"seconds": short(run.seconds), "losses": short(run.losses)}
                )
                if options.save_qkv and name == "strobe" and seed == 0:
                    save_qkv(run.model, size, device, options.save_qkv)
        verdict = compare_losses({name: torch.stack(curves) for name, curves in losses.items()})
        write({"seeds": options.seeds, "equal": verdict.equal, "share_of_band": short(verdict.share)})
    picture(verdict, facts, options.out / "train_gpt.png")
    farthest = int(verdict.share.nan_to_num(torch.inf).argmax())
    words = (
        f"{'equal' if verdict.equal else 'not equal'} within the noise of {options.seeds} seeds: the means of "
        "strobe and PyTorch are at most"
    )
    console.print(
        f"{words} {verdict.share[farthest]:.2g} of the band apart (at step {farthest + 1} of {size.steps})",
        soft_wrap=True,
    )
    return 0 if verdict.equal else 1


def short(numbers: Any) -> Any:
    """Numbers rounded to five digits for JSON, which has no NaN."""
    if isinstance(numbers, Tensor):
        return [short(number) for number in numbers.tolist()]
    return float(f"{numbers:.5g}") if math.isfinite(numbers) else None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="default 300 on a GPU, 30 on a CPU")
    parser.add_argument("--seeds", type=int, default=3, help="runs per attention (default 3, at least 2)")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cuda (default if there is a GPU) or cpu",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder of train_gpt.jsonl and .png (default results)"
    )
    parser.add_argument(
        "--save-qkv",
        type=Path,
        metavar="FILE",
        help="save q, k and v of the trained model, for strobe bench forward --data FILE",
    )
    options = parser.parse_args(arguments)
    if torch.device(options.device).type not in SIZES:
        parser.error(f"--device: got {options.device}, expected cuda or cpu")
    if options.seeds < 2:
        parser.error(f"--seeds: got {options.seeds}, expected at least 2; one run has no spread")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps: got {options.steps}, expected at least 1")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
