"""Traces: what identifies a function, numbers that change, refusals, and interval arithmetic."""

from __future__ import annotations

import functools
import threading

import pytest
import torch

import strobe
from strobe.mods import emit
from strobe.mods.cache import TRACES
from strobe.mods.evaluate import evaluate
from strobe.mods.intervals import ALWAYS, NEVER, Interval, bounds
from strobe.mods.program import Program
from strobe.mods.score import ScoreMod
from strobe.mods.trace import MASK_INPUTS, SCORE_INPUTS
from strobe.problem.mask import Tile, TileKind
from strobe.testing.mods import MODS

OFFSET = torch.tensor(2.0)


def _bind(function, inputs=SCORE_INPUTS, gradient=False):
    before = TRACES.traced
    found = TRACES.bind(function, inputs, gradient)
    return found, TRACES.traced - before


def _scaled(factor, table):
    return lambda score, b, h, q_idx, kv_idx: score * factor + table[h]


def test_the_same_code_over_other_tensors_is_traced_once():
    one, traces = _bind(_scaled(3.0, torch.zeros(4)))
    other, again = _bind(_scaled(3.0, torch.ones(4)))
    assert (traces, again) == (1, 0) and one.trace is other.trace
    assert other.tensors[0].sum() == 4  # the tensors of this call


def test_other_metadata_is_another_function():
    _bind(_scaled(3.5, torch.zeros(4)))
    assert _bind(_scaled(3.5, torch.zeros(4, requires_grad=True)))[1] == 1
    assert _bind(_scaled(3.5, torch.zeros(4, dtype=torch.float64)))[1] == 1


def test_a_number_that_changes_becomes_an_argument():
    texts, traces = set(), []
    for step in range(6):
        found, count = _bind(_scaled(float(step) + 0.25, torch.zeros(5)))
        texts.add(found.trace.program.text)
        traces.append(count)
    assert traces == [1, 1, 0, 0, 0, 0]  # a constant at first, then an argument
    assert len(texts) == 2 and found.numbers == (5.25,)


def test_attention_with_a_number_that_changes_decides_twice():
    """The texts belong to the Problem, so equal texts mean that no kernel is selected or compiled again."""
    q = torch.randn(1, 8, 2, 8)
    chosen = [strobe.explain(q, q, q, score_mod=_scaled(0.5 * n, torch.zeros(2))).problem.mods for n in range(5)]
    assert len(set(chosen)) == 2
    for n in range(3):
        exact = strobe.attention(q, q, q, scale=8**-0.5 * (n + 1))
        assert torch.allclose(
            strobe.attention(q, q, q, score_mod=_scaled(float(n + 1), torch.zeros(2))), exact, atol=1e-6
        )


def test_an_integer_of_more_than_32_bits_is_refused():
    scaled = lambda number: strobe.score_mod(lambda s, b, h, q, k: s + number * k)
    with pytest.raises(strobe.UnsupportedProblem, match=r"holds the integer 4294967296, .* float"):
        strobe.score_mod(lambda s, b, h, q, k: s + 2**32 * k)
    scaled(1), scaled(2)  # now the number is an argument
    with pytest.raises(
        strobe.InvalidProblem, match=r"score_mod: got 4294967296, expected .* 32 bits; write it as a float"
    ):
        scaled(2**32)
    ids = torch.tensor([2**40, 1])
    assert strobe.mask_mod(lambda b, h, q, k: ids[k] == 2**40).dense(1, 2).tolist() == [[[True, False]]]


def test_a_number_whose_value_is_read_stays_a_constant():
    def repeated(count):
        def score_mod(score, b, h, q_idx, kv_idx):
            for _ in range(count):
                score = score * 2
            return score

        return score_mod

    texts = [_bind(repeated(count))[0].trace.program.text for count in (1, 2, 3, 2)]
    assert len(set(texts)) == 3 and texts[1] == texts[3]


def test_a_function_may_make_a_score_and_a_mask_while_it_is_traced():
    def outer(score, b, h, q_idx, kv_idx):
        inner = strobe.score_mod(lambda s, b, h, q, k: s * 2 + OFFSET)
        strobe.mask_mod(lambda b, h, q, k: q >= k)
        return inner.function(score, b, h, q_idx, kv_idx)

    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_bind(outer)[0].trace.program.text), daemon=True)
    thread.start()
    thread.join(60)
    assert found == [_bind(lambda s, b, h, q, k: s * 2 + OFFSET)[0].trace.program.text]


class _Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(4.0))
        self.width = 3

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.shifted(h) * self.width

    def shifted(self, h):
        return self.table[h] + OFFSET

    def forward(self, score, b, h, q_idx, kv_idx):
        return self.score(score, b, h, q_idx, kv_idx)


def _weighted(score, b, h, q_idx, kv_idx, weight):
    return score * weight


def test_methods_modules_partials_globals_and_nested_functions_are_traced():
    module = _Module()
    one = torch.zeros(1)

    def value(function):
        found, _ = _bind(function)
        scalar = lambda v: torch.tensor(v, dtype=torch.int32)
        inputs = {"score": torch.tensor(1.0), "b": scalar(0), "h": scalar(2), "q": scalar(5), "k": scalar(3)}
        return evaluate(found.trace.program, inputs, (found.tensors, found.numbers))[0].item()

    assert value(module.score) == 13.0 and value(module) == 13.0
    module.table.data += 1
    assert value(module.score) == 16.0  # read when it runs
    assert value(functools.partial(_weighted, weight=torch.tensor(4.0))) == 4.0
    assert value(functools.partial(_weighted, weight=5.0)) == 5.0

    def outer(score, b, h, q_idx, kv_idx):
        def inner(x):
            return x + one[0] + OFFSET

        return inner(score) + q_idx % 3

    assert value(outer) == 5.0


@pytest.mark.parametrize(
    ("function", "words"),
    (
        (lambda s, b, h, q, k: s if s > 0 else -s, r"reads the value .* torch.where"),
        (lambda s, b, h, q, k: s * q.item(), r"reads the value .*\(item\)"),
        (lambda s, b, h, q, k: s + torch.rand(()), r"aten.rand"),
        (lambda s, b, h, q, k: torch.cumsum(s, 0), r"aten.cumsum"),
        (lambda s, b, h, q, k: s + torch.zeros(9)[q], r"indexes a computed value"),
        (lambda s, b, h, q, k: s + torch.zeros(1000, device="meta").sum(), "makes a tensor of 1000"),
    ),
)
def test_refusals_name_the_operation_and_the_line(function, words):
    with pytest.raises(strobe.UnsupportedProblem, match=words) as raised:
        strobe.score_mod(function)
    assert "test_trace.py:" in str(raised.value)


def test_a_whole_captured_tensor_is_refused():
    table = torch.zeros(1000)
    with pytest.raises(strobe.UnsupportedProblem, match="1000 elements"):
        strobe.score_mod(lambda s, b, h, q, k: s + table.sum())


@pytest.mark.parametrize("name", [name for name, case in MODS.items() if case.make(torch.float64).mask is not None])
def test_tile_kinds_are_those_of_the_elements(name):
    functions = MODS[name].make(torch.float64)
    mask = strobe.mask_mod(functions.mask)
    seen = mask.dense(64, 64, batch=2, heads=4)
    i = torch.arange(64)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    assert torch.equal(seen, functions.mask(b, h, i[:, None], i).expand(2, 4, 64, 64))
    program = mask.bind()
    decided = 0
    for b, h in ((0, 0), (1, 3)):
        for m in range(0, 64, 16):
            for n in range(0, 64, 16):
                tile = seen[b, h, m : m + 16, n : n + 16]
                kind = TileKind.FULL if tile.all() else TileKind.PARTIAL if tile.any() else TileKind.EMPTY
                assert mask.tile_kind(Tile(m, m + 16, n, n + 16, b), 64, 64, head=h) is kind
                inputs = {"b": Interval(b, b), "h": Interval(h, h), "q": Interval(m, m + 15), "k": Interval(n, n + 15)}
                (found,) = bounds(program.program, inputs, program.numbers)
                decided += found in (ALWAYS, NEVER)
                assert found not in (ALWAYS, NEVER) or kind is (TileKind.FULL if found == ALWAYS else TileKind.EMPTY)
    if name in ("causal", "sliding_window", "prefix_lm", "video_spatial", "sliding_tile_2d"):
        assert decided >= 8, decided  # no element is evaluated for these tiles


def test_masks_combine():
    i = torch.arange(9)
    q, k = i[:, None], i
    even = strobe.mask_mod(lambda b, h, q, k: k % 2 == 0)
    causal, window = strobe.causal(), strobe.window(2, 1)
    a, w, e = q >= k, (k >= q - 2) & (k <= q + 1), k % 2 == 0
    for mask, exact in (
        (causal & even, a & e),
        (even & causal, a & e),
        (even | causal, a | e),
        (causal | even, a | e),
        (~even, ~e),
        (~causal, ~a),
        (causal | window, a | w),
        (~(causal & window) & even, ~(a & w) & e),
        ((causal & even) | (window & ~even), (a & e) | (w & ~e)),
        (even & ~even, e & ~e),
        (strobe.prefix_causal(3) | even, (k < 3) | a | e),
        (strobe.window(None, 2**31 - 1) | even, k >= 0),
        (strobe.window(2**40, 0) | even, a | e),
        (~strobe.window(2**31 - 1, 2**40) | even, e),
        (strobe.prefix_causal(2**40) | even, k >= 0),
    ):
        assert torch.equal(mask.dense(9, 9)[0], exact.expand(9, 9))


def test_masks_of_batch_entries_combine():
    ids = torch.tensor([[0, 0, 1, 1, -1], [3, 3, 3, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([2, 5], dtype=torch.int32)
    mask = strobe.documents(ids) | strobe.key_lengths(lengths)
    exact = strobe.documents(ids).dense(5, 5) | strobe.key_lengths(lengths).dense(5, 5)
    assert torch.equal(mask.dense(5, 5), exact.expand(2, 5, 5))


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    (
        (lambda: strobe.mask_mod(lambda s, b, h, q, k: q >= k), strobe.InvalidProblem, "give it to score_mod="),
        (lambda: strobe.score_mod(lambda b, h, q, k: q >= k), strobe.InvalidProblem, "strobe.mask_mod"),
        (lambda: strobe.mask_mod(3), TypeError, "function"),
        (lambda: strobe.alibi([1.0]), TypeError, "tensor"),
        (lambda: strobe.relative_bias(torch.zeros(4, 4)), strobe.InvalidProblem, "odd"),
        (lambda: strobe.bias(torch.zeros(4, 4, dtype=torch.int32)), strobe.InvalidProblem, "floating"),
        (lambda: strobe.mask_mod(lambda b, h, q, k: h > 0).dense(4, 4), strobe.InvalidProblem, "heads="),
        (lambda: strobe.mask_mod(lambda b, h, q, k: (q - k) * 1.0), strobe.InvalidProblem, "torch.float32.*score_mod="),
        (lambda: strobe.mask_mod(lambda b, h, q, k: q - k), strobe.InvalidProblem, "returns torch.int32.*compare"),
        (lambda: strobe.mask_mod(lambda b, h, q, k: None), strobe.InvalidProblem, "returns NoneType"),
        (lambda: strobe.mask_mod(lambda b, h, q, k: 0), strobe.InvalidProblem, "returns int"),
        (lambda: strobe.score_mod(lambda s, b, h, q, k: (s, s)), strobe.InvalidProblem, "returns tuple"),
        (lambda: strobe.score_mod(lambda s, b, h, q, k: q >= k), strobe.InvalidProblem, "torch.bool.*strobe.mask_mod"),
        (lambda: strobe.score_mod(strobe.alibi), strobe.InvalidProblem, r"call it: strobe.alibi\(slopes\)"),
        (lambda: strobe.score_mod(torch.zeros(4, 4)), TypeError, r"strobe.bias\(tensor\)"),
        (lambda: strobe.score_mod(strobe.causal()), TypeError, "give it to mask="),
    ),
)
def test_wrong_arguments_have_four_parts(wrong, error, words):
    with pytest.raises(error, match=words) as raised:
        wrong()
    assert ": got " in str(raised.value) and "expected" in str(raised.value) and "; " in str(raised.value)


def test_vectors_made_within_a_function_have_all_their_elements():
    q = torch.randn(1, 4, 1, 8)
    found = strobe.attention(q, q, q, score_mod=lambda s, b, h, q, k: s * torch.ones(3, device=s.device).sum())
    assert torch.allclose(found, strobe.attention(q, q, q, scale=3 * 8**-0.5), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
@pytest.mark.parametrize(
    "of",
    (
        lambda a, b: a + b,
        lambda a, b: a - b,
        lambda a, b: a * b,
        lambda a, b: a * 3 - 200,
        lambda a, b: -a,
        lambda a, b: ~a,
        lambda a, b: (a - b).abs(),
        lambda a, b: a << 3,
        lambda a, b: a // (b | 1),
        lambda a, b: (a + b) // 2 + (a > b),
        lambda a, b: a**2,
        lambda a, b: torch.minimum(a + b, b),
        lambda a, b: a.int() - b,
        lambda a, b: (a.int() * 3).to(a.dtype),
        lambda a, b: a / 4 - b,
        lambda a, b: a < b,
        lambda a, b: a == 3,
    ),
)
def test_narrow_integers_wrap_around_as_in_torch(of, dtype):
    info, n = torch.iinfo(dtype), 48
    rows = torch.linspace(info.min, info.max, n, dtype=torch.float64).to(dtype)
    keys = rows.flip(0) + torch.tensor(1, dtype=dtype)
    at = torch.arange(n)
    wanted = of(rows[:, None].expand(n, n), keys.expand(n, n)).double()
    found, _ = _bind(lambda s, b, h, q, k: s * 0 + of(rows[q], keys[k]))
    inputs = {"score": torch.zeros(()), "q": at[:, None], "k": at}
    (values,) = evaluate(found.trace.program, inputs, (found.tensors, found.numbers), torch.float64)
    assert torch.equal(values.expand(n, n), wanted)


def test_a_number_beside_narrow_integers_wraps_around_as_in_torch():
    table = torch.arange(250, 256).to(torch.uint8)
    at = torch.arange(6)
    for n in (3, 5, 7, 260):
        make = lambda n: lambda s, b, h, q, k: s * 0 + (table[q] + n) + (n - table[k]) + (table[q] < n)
        found, _ = _bind(make(n))
        inputs = {"score": torch.zeros(()), "q": at[:, None], "k": at}
        (values,) = evaluate(found.trace.program, inputs, (found.tensors, found.numbers), torch.float64)
        rows = table[:, None]
        assert torch.equal(values, (rows + n).double() + (n - table).double() + (rows.int() < n).double())


def test_narrow_integers_are_indices():
    table, index = torch.arange(300.0), torch.tensor([0, 3, 200], dtype=torch.uint8)
    found, _ = _bind(lambda s, b, h, q, k: s + table[index[q]])
    (values,) = evaluate(
        found.trace.program, {"score": torch.zeros(()), "q": torch.arange(3)}, (found.tensors, found.numbers)
    )
    assert values.tolist() == [0.0, 3.0, 200.0]


def test_texts_are_canonical():
    program = ScoreMod(lambda s, b, h, q, k: s + 0.5).bind(True)
    assert Program.parse(program.text).text == program.text
    assert Program.parse(program.gradient).text == program.gradient
    assert TRACES.bind(lambda b, h, q, k: k <= q, MASK_INPUTS).trace.program.text.endswith("out 2")


def _written_through_a_view(score, b, h, q_idx, kv_idx):
    tripled = score * 1
    tripled[None].mul_(3)
    return tripled


def _read_before_its_base_was_written(score, b, h, q_idx, kv_idx):
    tripled = score * 1
    view = tripled[None]
    tripled.mul_(3)
    return view[0]


@pytest.mark.parametrize("function", [_written_through_a_view, _read_before_its_base_was_written])
def test_a_write_in_place_that_another_view_reads_is_refused(function):
    with pytest.raises(strobe.UnsupportedProblem, match="wrote to a view"):
        _bind(function)


def test_writes_in_place_to_the_tensor_that_is_read_are_traced():
    def function(score, b, h, q_idx, kv_idx):
        tripled = score[None][0]
        return tripled.mul_(3).add_(1)

    plain = _bind(lambda score, b, h, q_idx, kv_idx: score * 3 + 1)[0]
    assert _bind(function)[0].trace.program.text == plain.trace.program.text


def _bounds_of(function, q, k) -> Interval:
    """The interval of a function of positions."""
    program = _bind(lambda s, b, h, q_idx, k_idx: s + function(q_idx, k_idx))[0].trace.program
    at = {"q": Interval(*q), "k": Interval(*k), "score": Interval(0, 0)}
    return bounds(program, at)[0]


@pytest.mark.parametrize(
    "function",
    (
        lambda q, k: (q.long() * k.long() * 4).int(),
        lambda q, k: (k.long() * 2654435761).int(),
        lambda q, k: -((k.long() * 2654435761).int() % 100),
        lambda q, k: q * k * 4,
        lambda q, k: (q.long() * k.long()) * (q.long() * k.long()),
        lambda q, k: (q.float() * 1e9).int(),
        lambda q, k: torch.floor(q * 0.29) * 10,
        lambda q, k: (q * 0.29).int() * 10,
        lambda q, k: (q * 0.29 - 18.85).int() * 10,
        lambda q, k: (q.float() * 0.1 % 1.3) * 10,
        lambda q, k: (q.clamp(min=65) * 2**25).abs(),
        lambda q, k: (q.float() * 1e30 * 1e30) * torch.where(k < 0, 1.0, 0.0),
        lambda q, k: ~(k // 1000),
        lambda q, k: ~(q & 1) * 3,
        lambda q, k: (k // 65) ^ 6,
        lambda q, k: (q // 128) ^ (k & 4) ^ 1,
        lambda q, k: ((q >= 64) ^ (k >= 64)).int() + (~(q >= 64)).int() * 2,
    ),
)
def test_intervals_hold_what_wraps_around_and_rounds(function):
    """The elements of tiles, as torch computes them, lie within the interval or it knows nothing."""
    for q, k in (((65, 100), (65600, 65663)), ((0, 0), (1, 1)), ((100, 100), (1623, 1623)), ((70000, 70100), (3, 90))):
        rows, keys = (torch.arange(a, b + 1, dtype=torch.int32) for a, b in (q, k))
        values = (torch.zeros(()) + function(rows[:, None], keys)).double()
        low, high = _bounds_of(function, q, k)
        room = 1e-5 * values.abs() + 1e-5
        is_inside = (values >= low - room) & (values <= high + room) | values.isnan() & (low == -torch.inf)
        assert is_inside.all(), (q, k, low, high, values.min(), values.max())


def test_a_mask_over_integers_that_wrap_is_evaluated():
    mask = strobe.mask_mod(lambda b, h, q, k: (q.long() * k.long() * 4).int() >= 0)
    at = torch.arange(23140, 23204)
    seen = (at[:, None] * at * 4).int() >= 0
    assert seen.any() and not seen.all()
    assert mask.tile_kind(Tile(23140, 23204, 23140, 23204), 1 << 17, 1 << 17) is TileKind.PARTIAL


def test_an_index_that_wraps_is_guarded():
    """Elements before a captured tensor are not read."""
    table = torch.zeros(100)
    of = lambda index: emit.forward_text(ScoreMod(lambda s, b, h, q, k: s + table[index(k)]).bind(False).text)
    for index in (
        lambda k: (k.long() * 2654435761).int() % 100 - 1,
        lambda k: (k.long() * 2654435761).int() // 2,
        lambda k: (k.float() * 3.7).int(),
    ):
        assert "< 0, 0," in of(index)
    assert "< 0, 0," not in of(lambda k: k.long() * 2654435761 // 64 % 100)
    hashed = of(lambda k: (k.long() * 2654435761).int() % 100)
    assert "!= 0) & (((v" in hashed  # rounds towards minus infinity
