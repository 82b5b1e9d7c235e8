"""The demo's results as a self-contained HTML page: no script, and no external font or image."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import Any

from .figures import cycles_picture, growth, length_text, tile_picture

Results = dict[str, Any]


def page(results: Results) -> str:
    """The page for the results of `run.measure`."""
    css = (files("examples.demo") / "page.css").read_text(encoding="utf-8")
    body = "\n".join(section(results) for section in (_head, _embedding, _growing, _masked, _tiles, _cycles, _machine))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" '
        'content="width=device-width, initial-scale=1">\n'
        "<title>strobe "
        f"demo</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


# ---------------------------------------------------------------- sections


def _head(results: Results) -> str:
    text, longest = results["embedding"], results["growing"][-1]
    ours, padded = _way(text, "strobe"), _way(text, "SDPA, padded")
    both = [row for row in results["growing"] if "formula" in row["peak_bytes"]][-1]
    saved = 1 - ours["tokens_computed"] / padded["tokens_computed"]
    fewer = both["peak_bytes"]["formula"] / max(1, both["peak_bytes"]["strobe"])
    causal = next(entry for entry in results["tiles"] if entry["mask"] == "6 documents, causal")
    cards = [
        (
            f"{text['equality']['least_cosine']:.7f}",
            f"least cosine between {text['sentences']:,} embeddings made by strobe and by the model's own attention",
        ),
        (f"{saved:.0%}", "of the tokens of padded batches are padding, which packing leaves out"),
        (
            f"{fewer:.0f}×",
            (
                f"less memory than the plain formula at {both['length']:,} tokens; lengths to {longest['length']:,} "
                "were run"
            ),
        ),
        (f"{causal['share']['skipped']:.0%}", "of all tiles skipped for six causal documents"),
    ]
    boxes = "".join(
        f'<div class="card"><strong>{escape(value)}</strong><span>{escape(words)}</span></div>'
        for value, words in cards
    )
    return (
        "<h1><b>strobe</b>: exact attention in one pass</h1>\n"
        f'<p class="quiet">Measured on {escape(results["machine"]["device"])} with PyTorch '
        f"{escape(results['machine']['torch'])}. "
        f'Every number on this page comes from the run that wrote it.</p>\n<div class="cards">{boxes}</div>'
    )


def _embedding(results: Results) -> str:
    text = results["embedding"]
    slowest = max(way["ms"] for way in text["ways"])
    rows = [
        (
            way["way"],
            time_text(way["ms"]),
            bytes_text(way["peak_bytes"]),
            f"{way['tokens_computed']:,}",
            _bar(way["ms"] / slowest),
        )
        for way in text["ways"]
    ]
    same = text["equality"]
    verdict = (
        '<span class="yes">within the bound</span>' if same["equal"] else '<span class="no">beyond the bound</span>'
    )
    agree = sum(query["same_as_eager"] for query in text["queries"])
    return (
        "<h2>Real text through a real model</h2>\n"
        f"<p>{text['sentences']:,} sentences of <em>{escape(text['title'])}</em> through all-MiniLM-L6-v2, "
        "32 sentences per batch. A padded batch is as long as its longest sentence. "
        "A packed batch concatenates its sentences: with <code>strobe.attention_varlen</code> each attends only to "
        "itself, and nothing is computed for padding. "
        f"Time and memory are for {text['timed_sentences']} sentences spread evenly over the book, "
        f"{text['timed_tokens']:,} tokens.</p>\n"
        + _table(("", "time", "peak memory", "tokens computed", "time"), rows)
        + f"<p>Largest difference of any component: {same['max_difference']:.1e}; "
        f"least cosine: {same['least_cosine']:.8f}. "
        f"Against the same model in float64, the model's own attention is off by {same['error_eager']:.1e} and "
        f"strobe by {same['error_strobe']:.1e}: "
        f"{verdict} of twice the former and one rounding ({same['bound']:.1e}).</p>\n"
        "<h3>What the embeddings find</h3>\n"
        f'<p class="quiet">The three nearest sentences by cosine, from strobe\'s embeddings. '
        f"The model's own attention gives the same three in the same order for {agree} of {len(text['queries'])} "
        "questions.</p>\n"
        f'<div class="found">{"".join(_found(query) for query in text["queries"])}</div>'
    )


def _growing(results: Results) -> str:
    rows = results["growing"]
    size = results["sizes"]
    table = [
        (
            f"{row['length']:,}",
            *(
                time_text(row["ms"][name]) if name in row["ms"] else "too large"
                for name in ("strobe", "SDPA", "formula")
            ),
            *(
                bytes_text(row["peak_bytes"][name]) if name in row["peak_bytes"] else "too large"
                for name in ("strobe", "SDPA", "formula")
            ),
            f"{row['difference']:.0e}" if row["difference"] else "none",
        )
        for row in rows
    ]
    head = ("length", "strobe", "SDPA", "formula", "strobe, memory", "SDPA, memory", "formula, memory", "difference")
    return (
        "<h2>Growing context</h2>\n"
        f"<p>Causal attention, {size['heads']} heads of {size['head_dim']}, {size['dtype']}. The plain "
        "formula stores all scores; one pass over the keys stores a tile of them. "
        "Memory excludes a call's inputs: result and workspace.</p>\n"
        f'<div class="pair"><div class="card">{growth(rows, "ms", "time of one call", time_text)}</div>'
        f'<div class="card">{growth(rows, "peak_bytes", "peak memory of one call", bytes_text)}</div></div>\n'
        + _table(head, table)
        + '<p class="quiet">SDPA is torch.nn.functional.scaled_dot_product_attention. '
        "Difference: the largest between strobe's result and SDPA's. The choice at the foot of the page says which "
        "kernel strobe ran; if that passes plain calls to PyTorch's own kernel, the two times agree.</p>"
    )


def _masked(results: Results) -> str:
    rows = results["masked"]
    slowest = max(row["ms"]["strobe"] for row in rows)
    table = [
        (
            row["mask"],
            f"{row['visible']:.0%}",
            time_text(row["ms"]["strobe"]),
            time_text(row["ms"]["SDPA"]),
            bytes_text(row["peak_bytes"]["strobe"]),
            bytes_text(row["peak_bytes"]["SDPA"]),
            _bar(row["ms"]["strobe"] / slowest, ours=True),
        )
        for row in rows
    ]
    head = ("mask", "pairs visible", "strobe", "SDPA", "strobe, memory", "SDPA, memory", "strobe's time")
    return (
        "<h2>Masked tiles are not computed</h2>\n"
        f"<p>At {rows[0]['length']:,} tokens. strobe gets a mask object and skips tiles that are fully masked. SDPA "
        "supports full and causal directly and gets the others as a dense mask "
        f"({bytes_text(rows[0]['length'] ** 2)} of booleans, not counted in its memory).</p>\n" + _table(head, table)
    )


def _tiles(results: Results) -> str:
    figures = "".join(
        f"<figure>{tile_picture(entry['rows'], escape(entry['mask']))}<figcaption><b>{escape(entry['mask'])}</b><br>"
        f"<small>{entry['share']['skipped']:.0%} skipped, {entry['share']['masked']:.0%} "
        "masked</small></figcaption></figure>"
        for entry in results["tiles"]
    )
    first = results["tiles"][0]
    return (
        "<h2>Tiles visited, masked and skipped</h2>\n"
        f"<p>Queries run down, keys run right: {length_text(first['length'])} by {length_text(first['length'])}, "
        f"in tiles of {first['tile']}. "
        "Computed by the mask object: <code>mask.tile_kind(tile, S_q, S_k)</code>.</p>\n"
        '<div class="key"><span><i style="background:var(--whole)"></i>whole: computed without a mask</span>'
        '<span><i style="background:var(--masked)"></i>masked: computed, then masked</span>'
        '<span><i style="background:var(--skipped)"></i>skipped</span></div>\n'
        f'<div class="maps">{figures}</div>'
    )


def _cycles(results: Results) -> str:
    names = list(results["cycles"])
    figures = "".join(f'<div class="card">{cycles_picture(results["cycles"][name], name)}</div>' for name in names)
    return (
        "<h2>Which unit limits a GPU</h2>\n"
        f"<p>Counted, not measured: the cycles that a multiprocessor of {', '.join(names[:-1])} and {names[-1]} "
        "needs for a step of each pass, by unit: tensor cores, exponentials, shared memory, instructions. A step takes "
        "at least as long as its longest bar. strobe's kernels have not run on the last two.</p>\n"
        f'<div class="pair">{figures}</div>'
    )


def _machine(results: Results) -> str:
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in results["machine"].items()
    )
    choices = "\n\n".join(results["choices"].values())
    return (
        "<h2>Kernels and machine</h2>\n<p>The kernels that strobe selects (<code>strobe.explain</code>), for "
        "the packed batches of the model, then for causal attention at the largest length.</p>\n"
        f"<pre>{escape(choices)}</pre>\n<dl>{facts}</dl>\n"
        '<p class="quiet">Times are medians of interleaved rounds. Peak memory is read from PyTorch\'s allocator. '
        "demo.json beside this page has the same numbers.</p>"
    )


# ---------------------------------------------------------------- pieces


def _way(text: Results, start: str) -> Results:
    return next(way for way in text["ways"] if way["way"].startswith(start))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    cell = lambda text: text if text.startswith("<td") else f"<td>{escape(text)}</td>"
    lines = "".join(f"<tr{_ours(row)}>{''.join(map(cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>\n'


def _ours(row: tuple[str, ...]) -> str:
    return ' class="ours"' if row[0].startswith("strobe") else ""


def _bar(share: float, ours: bool = False) -> str:
    colour = ";background:var(--strobe)" if ours else ""
    return f'<td class="bar"><i style="--w:{max(1, round(100 * share))}%{colour}"></i></td>'


def _found(query: Results) -> str:
    lines = "".join(
        f"<li><b>{best['cosine']:.2f}</b><span>{escape(_short(best['sentence']))}</span></li>" for best in query["best"]
    )
    return f'<div class="card"><q>{escape(query["query"])}</q><ol>{lines}</ol></div>'


def _short(sentence: str, most: int = 170) -> str:
    """
    >>> _short("a few words too many", most=10)
    'a few …'
    """
    return sentence if len(sentence) <= most else sentence[:most].rsplit(" ", 1)[0] + " …"


def time_text(ms: float) -> str:
    """
    >>> time_text(0.0421), time_text(7.3), time_text(68.3), time_text(1234.5)
    ('42 us', '7.3 ms', '68 ms', '1.2 s')
    """
    if ms < 1:
        return f"{ms * 1e3:.0f} us"
    if ms >= 1000:
        return f"{ms / 1e3:.1f} s" if ms < 10_000 else f"{ms / 1e3:.0f} s"
    return f"{ms:.1f} ms" if ms < 10 and ms != round(ms) else f"{ms:.0f} ms"


def bytes_text(count: float) -> str:
    """
    >>> bytes_text(512), bytes_text(3 * 2**20), bytes_text(1.5 * 2**30)
    ('512 B', '3 MiB', '1.5 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.2g} {unit}" if count < 10 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
