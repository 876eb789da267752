"""Attention with tokens shared out among processes, against that of one process."""

import re
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.gpu import TRITON_DEVICE
from helpers.ranks import TIMEOUT_S, Ranks
from tilewright import reference, slices
from tilewright.core.errors import DeviceError, PatternError
from tilewright.devices import qkv
from tilewright.slices import parallel, prediction


@pytest.fixture(scope="module", params=[2, 3], ids=lambda ranks: f"P{ranks}")
def ranks(request, tmp_path_factory):
    found = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    found.number = request.param
    yield found
    found.close()


def tokens(batch, heads, n, dim=64, seed=0, dtype=torch.float32):
    """q, k and v as a projection leaves them: [B, H, N, D] views of [B, N, 3, H, D]."""
    x = torch.randn(batch, n, 3, heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.permute(2, 0, 3, 1, 4).unbind(0)


def dense(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def values(q, k, v):
    """No arithmetic: what comes back shows where every value went."""
    return v + 0


def own(sharding, tensors):
    return [sharding.own(x, 2) for x in tensors]


def joined(found):
    return torch.cat(found, 2)


# On the ranks.


def attended(attention, lengths, heads, tensors, replicated=None):
    sharding = parallel.shard(lengths, heads)
    with torch.inference_mode():
        return sharding.attend(*own(sharding, tensors), attention, replicated=replicated)


def attended_as_given(lengths, heads, *tensors):
    return parallel.shard(lengths, heads).attend(*tensors, values)


def seen(lengths, heads, tensors):
    """What the attention of each rank is given."""
    given = []

    def attention(*whole):
        given.extend(x.clone() for x in whole)
        return whole[2].clone()

    sharding = parallel.shard(lengths, heads)
    sharding.attend(*own(sharding, tensors), attention)
    return given, sharding.own_heads


def gathered(lengths, x, dim):
    sharding = parallel.shard(lengths, 8)
    return sharding.gather(sharding.own(x, dim), dim)


def chosen(q, k, v):
    """Attention to an eighth of the keys, those that a group of 16 queries is expected to attend to most."""
    lists = slices.predict(q, k, keep=1 / 8, budget=1.0, rows=16, pool=4, least=1)
    return slices.attend(q, k, v, lists)


def by_own_keys(lengths, tensors):
    """Attention of all queries to a rank's own keys, merged."""
    sharding = parallel.shard(lengths)
    q, k, v = own(sharding, tensors)
    return sharding.merge(*slices.dense(sharding.gather(q, 2), k, v))


def merged_as_given(lengths, heads, out, lse):
    return parallel.shard(lengths, heads).merge(out, lse)


LENGTHS = {2: {"even": 130, "odd": 131, "given": (40, 91)}, 3: {"even": 132, "odd": 131, "given": (1, 90, 40)}}


@pytest.mark.parametrize("lengths", ["even", "odd", "given"])
@pytest.mark.parametrize("batch, heads", [(1, 6), (2, 4), (1, 3)], ids=["B1-H6", "B2-H4", "B1-H3"])
def test_every_value_comes_back_to_its_place(ranks, lengths, batch, heads):
    lengths = LENGTHS[ranks.number][lengths]
    q, k, v = tokens(batch, heads, lengths if isinstance(lengths, int) else sum(lengths))
    found = ranks.results(attended, values, lengths, heads, (q, k, v))
    assert torch.equal(joined(found), v)
    for given, own_heads in ranks.results(seen, lengths, heads, (q, k, v)):
        assert all(torch.equal(x, y[:, own_heads]) for x, y in zip(given, (q, k, v), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_ranks_attend_as_one_process(ranks, dtype):
    q, k, v = tokens(2, 3, 131, dtype=dtype)
    found = joined(ranks.results(attended, dense, 131, 3, (q, k, v)))
    assert found.dtype == dtype
    assert reference.relative_error(found, dense(*(x.double() for x in (q, k, v)))) < reference.TOLERANCE[dtype]


@pytest.mark.parametrize("lengths", ["even", "odd", "given"])
def test_lists_that_ranks_make_are_those_of_one_process(ranks, lengths):
    lengths = LENGTHS[ranks.number][lengths]
    q, k, v = tokens(2, 4, lengths if isinstance(lengths, int) else sum(lengths))
    found = joined(ranks.results(attended, chosen, lengths, 4, (q, k, v)))
    expected = chosen(q, k, v)
    assert reference.relative_error(found, expected) < reference.TOLERANCE[torch.float32]
    assert reference.relative_error(expected, dense(q, k, v)) > 0.1


@pytest.mark.parametrize("heads", [1, 3])
def test_parts_over_the_keys_of_each_rank_merge_to_attention_over_all(ranks, heads):
    q, k, v = tokens(2, heads, 131)
    found, lse = zip(*ranks.results(by_own_keys, 131, (q, k, v)), strict=True)
    expected, expected_lse = slices.dense(q, k, v)
    assert reference.relative_error(joined(found), expected) < reference.TOLERANCE[torch.float32]
    assert torch.allclose(joined(lse), expected_lse, atol=1e-5)


@pytest.mark.parametrize(
    "shape, lse_shape, message",
    [((1, 3, 19, 64), (1, 3, 19), "out: expected 20 tokens"), ((1, 3, 20, 64), (1, 3, 19), "lse: expected shape")],
    ids=["out", "lse"],
)
def test_parts_of_another_size_are_refused(ranks, shape, lse_shape, message):
    for error in ranks.run(merged_as_given, 20, 3, torch.zeros(shape), torch.zeros(lse_shape)):
        assert isinstance(error, PatternError) and message in str(error)


@pytest.mark.parametrize("batch, heads", [(1, 6), (2, 4)], ids=["B1-H6", "B2-H4"])
def test_replicated_tokens_follow_and_come_back_on_every_rank(ranks, batch, heads):
    q, k, v = tokens(batch, heads, 131)
    text = tokens(batch, heads, 7, seed=1)
    whole = dense(*(torch.cat(pair, 2) for pair in zip((q, k, v), text, strict=True)))
    found, rest = zip(*ranks.results(attended, dense, 131, heads, (q, k, v), text), strict=True)
    tolerance = reference.TOLERANCE[torch.float32]
    assert reference.relative_error(joined(found), whole[:, :, :131]) < tolerance
    assert all(torch.equal(x, rest[0]) for x in rest)
    assert reference.relative_error(rest[0], whole[:, :, 131:]) < tolerance


@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.parametrize("lengths", ["even", "odd", "given"])
def test_gather_gives_every_rank_all_tokens(ranks, lengths, dim):
    lengths = LENGTHS[ranks.number][lengths]
    shape = [3, 4, 5]
    shape[dim] = lengths if isinstance(lengths, int) else sum(lengths)
    x = torch.randn(shape)
    assert all(torch.equal(found, x) for found in ranks.results(gathered, lengths, x, dim))


@pytest.mark.parametrize(
    "give, message",
    [
        (lambda q, k, v: (q[:, :, 1:], k, v), "q: expected .*tokens.*on rank"),
        (lambda q, k, v: (q, k[:, 1:], v), "k: expected .*3 heads"),
        (lambda q, k, v: (q, k, v[..., 1:]), "v: expected .*D as of q"),
        (lambda q, k, v: (q, k, v.half()), "v: expected torch.float32 .*found torch.float16"),
        (lambda q, k, v: (q[0], k, v), "q: expected"),
        (lambda q, k, v: (q, k, v.clone().requires_grad_()), "v: the exchange has no backward"),
    ],
    ids=["tokens", "heads", "dim", "type", "rank", "gradient"],
)
def test_other_tensors_are_refused_before_anything_is_sent(ranks, give, message):
    given = give(*tokens(1, 3, 10))
    for error in ranks.run(attended_as_given, (10,) * ranks.number, 3, *given):
        assert isinstance(error, PatternError)
        assert "\n" not in str(error)
        with pytest.raises(PatternError, match=message):
            raise error


def keys_dropped(q, k, v):
    return v[:, :, 1:]


def test_an_attention_that_returns_another_shape_is_refused(ranks):
    for error in ranks.run(attended, keys_dropped, 20, 3, tokens(1, 3, 20)):
        assert isinstance(error, PatternError) and "attention: expected a result (1," in str(error)


def test_without_heads_nothing_is_exchanged_for_them(ranks):
    for error in ranks.run(attended, values, 20, None, tokens(1, 3, 20)):
        assert isinstance(error, PatternError) and "made with a number of them" in str(error)


def bad_replicated(lengths, heads, tensors, text):
    return attended(values, lengths, heads, tensors, text)


def test_replicated_tokens_of_another_size_are_refused(ranks):
    text = tokens(1, 2, 7)
    for error in ranks.run(bad_replicated, 20, 3, tokens(1, 3, 20), text):
        assert isinstance(error, PatternError) and "replicated q: expected (1, 3, t, 64)" in str(error)


def refused(*args):
    with pytest.raises(PatternError) as found:
        parallel.shard(*args)
    return str(found.value)


def test_fewer_heads_or_tokens_than_ranks_are_refused(ranks):
    few = ranks.number - 1
    assert all("heads: expected at least one for each" in text for text in ranks.results(refused, 20, few))
    assert all("tokens: expected a number" in text for text in ranks.results(refused, few, 20))
    assert all("tokens: expected a number" in text for text in ranks.results(refused, (3,) * few, 20))
    zero = (0,) * ranks.number
    assert all("tokens: expected a number" in text for text in ranks.results(refused, zero, 20))


def test_without_a_process_group_there_is_an_error():
    with pytest.raises(DeviceError, match="init_process_group"):
        parallel.shard(20, 4)


def attended_by_one():
    """Rank 1 raises an error in its attention; the timeout is short."""
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=2))
    sharding = parallel.shard(20, 4, group)

    def attention(q, k, v):
        if sharding.rank == 1:
            raise ValueError("out of memory, say")
        return v + 0

    sharding.attend(*own(sharding, tokens(1, 4, 20)), attention)


def test_a_rank_with_an_error_does_not_hang_the_others(tmp_path):
    ranks = Ranks(2, tmp_path)
    begin = time.perf_counter()
    other, failed = ranks.run(attended_by_one)
    assert isinstance(failed, ValueError)
    assert isinstance(other, RuntimeError) and "imed out" in str(other)
    assert time.perf_counter() - begin < TIMEOUT_S
    ranks.close()


class Allocations(TorchDispatchMode):
    """Counts values of the memory that operators allocate."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        if not operator._schema.name.startswith("c10d::") and not operator.is_view:
            given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            if isinstance(found, torch.Tensor) and found.untyped_storage().data_ptr() not in given:
                self.values += found.numel()
        return found


def allocated(lengths, heads, tensors):
    """Values allocated by `attend`, those of the attention's result apart, and bytes handed to the process group."""
    sharding = parallel.shard(lengths, heads)
    sent = []

    def all_to_all(found, given, received, sizes, group, call=dist.all_to_all_single):
        sent.append(sum(size for rank, size in enumerate(sizes) if rank != sharding.rank) * given.element_size())
        call(found, given, received, sizes, group=group)

    made = []

    def attention(q, k, v):
        made.append(qkv.empty(v, v.shape[2]).copy_(v))
        return made[0]

    with Allocations() as allocations, patch.object(dist, "all_to_all_single", all_to_all):
        sharding.attend(*own(sharding, tensors), attention)
    q = tensors[0]
    stated = sharding.sent_bytes(q.shape[0], q.shape[3], q.element_size())
    share = sharding.tokens[sharding.rank] * q.shape[0] * heads * q.shape[3]
    return allocations.values - made[0].numel(), share, made[0].numel(), sum(sent), stated


def test_memory_and_bytes_are_those_that_are_stated(ranks):
    for values, share, whole, sent, stated in ranks.results(allocated, 131, 4, tokens(1, 4, 131)):
        # q, k and v sent and received; what comes back, and the result, in which the heads of a token are joined.
        assert values == 3 * share + 3 * whole + 2 * share
        assert sent == stated > 0


def test_equal_shares_send_what_the_formula_says():
    ranks = 4
    sharding = parallel.Sharding((128,) * ranks, (3,) * ranks, 1)
    assert sharding.sent_bytes(2, 64, 2) == 4 * 2 * 512 * 12 * 64 * 2 * (ranks - 1) / ranks**2


RECIPES = re.findall(
    r"^```python\n(.+?)^```$",
    (Path(__file__).parents[2] / "docs/parallel.md").read_text(),
    re.MULTILINE | re.DOTALL,
)
HEADS, CHANNELS = 3, 192


class Layer:
    """What the first recipe calls a layer: x -> W_o attention(W_q x, W_k x, W_v x), a table added to q and k."""

    def __init__(self, weights):
        self.weights = weights

    def project(self, x, cos, sin):
        q, k, v = ((x @ w.T).unflatten(2, (HEADS, -1)).transpose(1, 2) for w in self.weights[:3])
        return q + cos, k + sin, v

    def output(self, out):
        return out.transpose(1, 2).flatten(2) @ self.weights[3].T


def drawn(*shapes):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]


def layers():
    return [Layer(drawn(*4 * [(CHANNELS, CHANNELS)])) for _ in range(2)]


def tables(n):
    return drawn((n, 64), (n, 64))


# What `predict` is called with: lists of few keys of short sequences.
SETTINGS = {"rows": 16, "pool": 4, "least": 1}


def recipe(number, given, wanted, **replaced):
    """What a recipe of the document leaves under the names `wanted`, for small tensors."""
    text = RECIPES[number]
    for old, new in ({"budget=0.2": "budget=0.2, **settings"} | replaced).items():
        text = text.replace(old, new)
    names = {"settings": SETTINGS, **given}
    with patch.object(dist, "init_process_group", lambda *_: None), torch.inference_mode():
        exec(text, names)
    return [names[name] for name in wanted]


def first_recipe(n):
    (cos, sin), (embedded,) = tables(n), drawn((2, n, CHANNELS))
    given = {"layers": layers(), "embedded": embedded, "cos": cos, "sin": sin}
    return recipe(0, given, ["x"], **{"tokens=32760, heads=12": f"tokens={n}, heads={HEADS}"})[0]


def heads_recipe(n):
    own = parallel.shard(n, HEADS).own_heads
    rows = slice(64 * own.start, 64 * own.stop)
    w_q, w_k, w_v, w_o = drawn(*4 * [(CHANNELS, CHANNELS)])
    norm_q, norm_k = drawn((CHANNELS,), (CHANNELS,))
    given = {"w_q": w_q[rows], "w_k": w_k[rows], "w_v": w_v[rows], "w_o": w_o[:, rows], "dist": dist}
    given |= {"norm_q": norm_q[rows], "norm_k": norm_k[rows], "width": CHANNELS, "head_dim": 64, "attention": chosen}
    (layer,) = recipe(2, given, ["layer"])
    with torch.inference_mode():
        return layer(*drawn((2, n, CHANNELS)))


def keys_recipe(n, tensors):
    sharding = parallel.shard(n)
    q, k, v = own(sharding, tensors)
    count = k.shape[2]
    lists = slices.from_mask(torch.ones(1, 1, -(-n // 16), count, dtype=torch.bool), n, batch=1, heads=1, rows=16)
    given = {"tokens": n, "q": q, "k": k, "v": v, "lists": lists, "parallel": parallel, "slices": slices}
    return recipe(3, given, ["out"])[0]


def test_the_first_recipe_of_the_document_is_the_network_of_one_process(ranks):
    n = 131
    (x,), (cos, sin) = drawn((2, n, CHANNELS)), tables(n)
    for layer in layers():
        q, k, v = layer.project(x, cos, sin)
        lists = slices.predict(q, k, keep=0.2, budget=0.2, **SETTINGS)
        x = x + layer.output(slices.attend(q, k, v, lists))
    for found in ranks.results(first_recipe, n):
        assert reference.relative_error(found, x) < 1e-5


def test_the_recipe_for_heads_is_the_layer_of_one_process(ranks):
    n = 131
    (x,) = drawn((2, n, CHANNELS))
    w_q, w_k, w_v, w_o = drawn(*4 * [(CHANNELS, CHANNELS)])
    norm_q, norm_k = drawn((CHANNELS,), (CHANNELS,))
    q, k = F.rms_norm(x @ w_q.T, (CHANNELS,), norm_q, 1e-6), F.rms_norm(x @ w_k.T, (CHANNELS,), norm_k, 1e-6)
    q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in (q, k, x @ w_v.T))
    expected = chosen(q, k, v).transpose(1, 2).flatten(2) @ w_o.T
    for found in ranks.results(heads_recipe, n):
        assert reference.relative_error(found, expected) < 1e-5


def test_the_recipe_for_keys_is_attention_over_all_keys(ranks):
    q, k, v = tokens(1, 1, 131)
    found = joined(ranks.results(keys_recipe, 131, (q, k, v)))
    assert reference.relative_error(found, dense(q, k, v)) < reference.TOLERANCE[torch.float32]


def compiled(lengths, heads, tensors):
    sharding = parallel.shard(lengths, heads)

    def layer(q, k, v):
        return sharding.attend(2 * q, k, v, chosen) + 1

    with torch.inference_mode():
        given = own(sharding, tensors)
        return torch.compile(layer, backend="aot_eager", fullgraph=True)(*given), layer(*given)


def test_calls_compile_without_graph_breaks(ranks):
    if ranks.number > 2:
        pytest.skip("compiling takes long, and is the same for each number of ranks")
    for found, expected in ranks.results(compiled, 131, 4, tokens(2, 4, 131)):
        assert torch.equal(found, expected)


@pytest.fixture
def alone(triton_device, monkeypatch):
    """The device of the kernels, which is all that a process group of this process alone computes on."""
    monkeypatch.setitem(prediction.SELECTIONS, TRITON_DEVICE, "tilewright.slices.cuda.selection")
    prediction._selection.cache_clear()
    backend = "nccl" if TRITON_DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield triton_device
    dist.destroy_process_group()
    prediction._selection.cache_clear()


def test_the_kernels_of_a_gpu_take_tokens_as_they_arrive(alone):
    q, k, v = (x.to(alone) for x in tokens(2, 2, 50))
    text = [x.to(alone) for x in tokens(2, 2, 7, seed=1)]
    seen = []

    def attention(*whole):
        seen.extend(whole)
        return chosen(*whole)

    # With replicated tokens, what a process has goes through the exchange even if it is alone.
    out, rest = parallel.shard(50, 2).attend(q, k, v, attention, replicated=text)
    assert not any(x.is_contiguous() or x.transpose(1, 2).is_contiguous() for x in seen)
    expected = chosen(*(torch.cat(pair, 2) for pair in zip((q, k, v), text, strict=True)))
    assert torch.equal(torch.cat((out, rest), 2), expected)
