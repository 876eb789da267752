"""Slices in diffusers: its own networks and pipelines, with random weights, attend by lists as they say.

Skipped where diffusers is not installed. `test_hosts` runs this file with several versions.
"""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from helpers import hosts
from helpers.ranks import Ranks
from tilewright import slices
from tilewright.core.errors import ConfigError, PatternError, Unavailable

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
adapter = pytest.importorskip("tilewright.integrations.diffusers")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no dispatcher")

from tilewright.integrations import _context_parallel, _denoising  # noqa: E402

ALL = {"tokens": 100, "keep": 1.0, "budget": 1.0}
FEW = {"tokens": 100, "keep": 0.3, "budget": 0.4, "rows": 32}
NEAR = {"pattern": "temporal", "grid": hosts.GRID, "reach": 3}
PARALLEL = adapter.PARALLEL in inspect.signature(dispatch._AttentionBackendRegistry.register).parameters


@pytest.fixture(autouse=True)
def own_backend():
    """Of the process: a model that is given a backend by name sets it."""
    with dispatch.attention_backend("native"):
        yield


def network(family, seed=0, **more):
    """A network and what it is called with."""
    name, sizes, inputs, _, _ = hosts.FAMILIES[family]
    made = getattr(diffusers, name, None)
    if made is None:
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    takes = inspect.signature(made.forward).parameters
    given = {name: value for name, value in inputs().items() if name in takes}
    if "txt_seq_lens" in takes:
        given["txt_seq_lens"] = [hosts.TEXT] * 2
    torch.manual_seed(seed)
    known = inspect.signature(made.__init__).parameters
    net = made(**{name: value for name, value in {**sizes, **more}.items() if name in known})
    return net.eval(), {**given, "return_dict": False}


class Masked(TorchFunctionMode):
    """Torch's attention of many tokens is `attend(q, k, v, mask)`."""

    def __init__(self, attend):
        super().__init__()
        self._attend = attend

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            named = inspect.signature(reference).bind(*args, **(kwargs or {})).arguments
            q, k, v = named["query"], named["key"], named["value"]
            if q.shape == k.shape and q.shape[2] >= 100:
                return self._attend(q, k, v, named.get("attn_mask"))
        return func(*args, **(kwargs or {}))


def reference(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """The signature of torch's function, which has none."""


@pytest.mark.parametrize("family", hosts.FAMILIES)
@torch.no_grad()
def test_a_family_answers_the_same_with_all_keys_and_by_masked_attention_with_given_lists(family):
    net, given = network(family)
    _, _, _, layers, (first, last) = hosts.FAMILIES[family]
    expected = net(**given)[0]
    attention = adapter.register(**ALL)
    with adapter.denoising(net):
        found = net(**given)[0]
    assert attention.calls["slices"] == layers
    assert attention.calls.keys() <= {"slices", "queries and keys differ", "few tokens"}
    assert torch.allclose(found, expected, atol=1e-5) and not found.isnan().any()
    # As it was.
    assert torch.equal(net(**given)[0], expected) and attention.calls["slices"] == layers

    image = family in ("flux", "qwen-image")
    near = {**NEAR, "grid": (1, 12, 12)} if image else NEAR
    stated = {"by": "given", "budget": 1.0, "rows": 16}

    def masked(q, k, v, mask):
        lists = slices.predict(q, k, text=(first, last), **stated, **near)
        pattern = torch.from_numpy(lists.graph(0, 0).to_dense())
        return F.scaled_dot_product_attention(q, k, v, pattern if mask is None else pattern & mask)

    dense = expected
    with Masked(masked):
        expected = net(**given)[0]
    assert (expected - dense).abs().max() > 1e-3
    adapter.register(tokens=100, predictor=near, **stated)
    with adapter.denoising(net):
        assert torch.allclose(net(**given)[0], expected, atol=1e-5)


@torch.no_grad()
def test_padding_of_prompts_is_not_seen_whatever_it_is():
    adapter.register(**FEW)
    for family, name in (("hunyuan", "encoder_hidden_states"), ("qwen-image", "encoder_hidden_states")):
        net, given = network(family)
        if family == "qwen-image" and "txt_seq_lens" in given:
            # Its masks are not read.
            continue
        with adapter.denoising(net):
            found = net(**given)[0]
            given[name] = given[name].clone()
            given[name][1, hosts.SHORT :] *= 30
            assert torch.allclose(net(**given)[0], found, atol=1e-5)


@torch.no_grad()
def test_wan_by_the_backend_of_a_name_with_settings_by_context():
    net, given = network("wan")
    expected = net(**given)[0]
    attention = adapter.register("slices-of-all", **ALL)
    net.set_attention_backend("slices-of-all")
    found = net(**given)[0]
    assert attention.calls == {"slices": 2, "queries and keys differ": 2}
    assert torch.allclose(found, expected, atol=1e-5) and not found.isnan().any()
    with attention.using(keep=0.3, rows=32):
        few = net(**given)[0]
    assert 1e-5 < float((few - expected).norm() / expected.norm()) < 0.1
    assert torch.equal(net(**given)[0], found)
    net.reset_attention_backend()
    # In 0.42 the name stays that of the process.
    with dispatch.attention_backend("native"):
        assert torch.equal(net(**given)[0], expected)
    # Again, with other settings.
    adapter.register("slices-of-all", **FEW)
    with dispatch.attention_backend("slices-of-all"):
        assert torch.equal(net(**given)[0], few)


@torch.no_grad()
def test_first_frames_and_references_stay_dense_by_name_and_by_mask():
    seen = []

    def spy(q, k, text=(0, 0), **more):
        seen.append((q, text))
        return predict(q, k, text=text, **more)

    predict = slices.predict
    for family, name, ranges in (
        ("wan", "first_frame", [(0, 48)]),
        ("ltx", "first_frame", [(0, 48)]),
        ("hunyuan", "first_frame", [(0, 48)]),
        ("cogvideox-2b", "first_frame", [(20, 68)]),
        ("qwen-image", "reference", [(20 + 100, 20 + 144)]),
    ):
        net, given = network(family)
        if name == "reference":
            given["img_shapes"] = [[(1, 10, 10), (1, 4, 11)]] * 2
        mask = torch.zeros(hosts.VIDEO + 20 * (family not in ("wan", "ltx")), dtype=torch.bool)
        for begin, end in ranges:
            mask[begin:end] = True
        found = []
        for dense in ([name], ranges, mask):
            adapter.register(**FEW, dense=dense)
            with pytest.MonkeyPatch.context() as patch, adapter.denoising(net):
                patch.setattr(slices, "predict", spy)
                found.append(net(**given)[0])
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        first, last = hosts.FAMILIES[family][-1]
        assert {sum(text) for _, text in seen} == {first + last + int(mask.sum())}
        seen.clear()
    # Beside padded text, which goes last.
    assert not found[0].isnan().any()


def pipeline(**more):
    """Wan 2.2's: two networks, the second of which takes over in the last of five steps."""
    if not hasattr(diffusers.WanPipeline, "from_pretrained") or "transformers" in str(
        getattr(diffusers.WanPipeline, "_backends", "")
    ):
        pytest.skip("transformers is not installed")
    parts = {"transformer": network("wan")[0], "transformer_2": network("wan", seed=1)[0], "boundary_ratio": 0.5}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = diffusers.WanPipeline(tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, **(parts | more))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def frames(pipe, **more):
    return pipe(
        prompt_embeds=hosts.random(1, 512, 32),
        negative_prompt_embeds=hosts.random(1, 512, 32, seed=1),
        latents=hosts.random(1, 16, 3, 12, 16),
        **{"height": 96, "width": 128, "num_frames": 9, "guidance_scale": 3.0, "output_type": "latent"},
        **{"num_inference_steps": 5, **more},
    ).frames


STEPS = {"refresh": [0, 2], "first_dense": 1, "dense_layers": 0}


def test_a_pipeline_keeps_lists_for_networks_layers_and_branches_until_its_callback_says_when():
    pipe, calls = pipeline(), []
    more = {name: value for name, value in FEW.items() if name != "tokens"}
    own = [slices.Steps(**STEPS, joins=True, **more) for _ in range(2)]

    def by_number(q, k, v, _):
        """Two layers, with the prompt and without, of the first network for four steps."""
        step, of_step = divmod(len(calls), 4)
        branch, layer = divmod(of_step, 2)
        calls.append(step)
        return own[step > 3](layer, step, branch, q, k, v)

    with Masked(by_number):
        expected = frames(pipe)
    held = []

    def callback(pipe, step, timestep, tensors):
        held.append(run.memory_bytes)
        return run.step_end(pipe, step, timestep, tensors)

    attention = adapter.register(**FEW, steps=STEPS)
    with adapter.denoising(pipe) as run:
        for _ in range(2):
            assert torch.allclose(frames(pipe, callback_on_step_end=callback), expected, atol=1e-5)
            assert run.step == run.memory_bytes == 0
    assert attention.calls == {"slices": 40, "queries and keys differ": 40}
    # Bits of a layer and branch: 2 heads of 5 groups, and 5 words with a count.
    one = 2 * 5 * 6 * 4
    assert held == 2 * ([4 * one] * 4 + [8 * one])
    assert sum(each.memory_bytes for each in own) == 8 * one
    assert "cache_context" not in vars(pipe.transformer) and not pipe.transformer._forward_pre_hooks
    held.clear()
    adapter.register(**FEW, steps={**STEPS, "shared": {"uncond": "cond"}})
    with adapter.denoising(pipe) as run:
        frames(pipe, callback_on_step_end=callback)
    assert held == [2 * one] * 4 + [4 * one]


def test_a_pipeline_whose_classes_choose_no_attention_keeps_lists_of_both_branches_at_once():
    pipeline()
    parts = {"transformer": network("cogvideox-5b")[0], "scheduler": diffusers.CogVideoXDDIMScheduler()}
    pipe = diffusers.CogVideoXPipeline(tokenizer=None, text_encoder=None, vae=None, **parts)
    pipe.set_progress_bar_config(disable=True)
    more = {name: value for name, value in FEW.items() if name != "tokens"}
    own, calls = slices.Steps(refresh=[0, 2], first_dense=0, text=(hosts.TEXT, 0), **more), []

    def by_number(q, k, v, _):
        step, layer = divmod(len(calls), 2)
        calls.append(step)
        return own(layer, step, "both", q, k, v)

    def of_cog(**more):
        prompts = [hosts.random(1, hosts.TEXT, 24, seed=seed) for seed in range(2)]
        given = {"latents": hosts.random(1, 3, 16, 12, 16), "height": 96, "width": 128, "num_frames": 9, **more}
        given |= {"num_inference_steps": 3, "max_sequence_length": hosts.TEXT, "output_type": "latent"}
        return pipe(prompt_embeds=prompts[0], negative_prompt_embeds=prompts[1], **given).frames

    with Masked(by_number):
        expected = of_cog()
    attention = adapter.register(**FEW, steps={"refresh": [0, 2], "first_dense": 0})
    with adapter.denoising(pipe) as run:
        for _ in range(2):
            assert torch.allclose(of_cog(callback_on_step_end=run.step_end), expected, atol=1e-5)
    assert attention.calls == {"slices": 12}


def test_a_run_that_was_interrupted_is_not_gone_on_with_and_a_forgotten_callback_is_told():
    pipe = pipeline(transformer_2=None, boundary_ratio=None)
    adapter.register(**FEW, steps=STEPS)
    with adapter.denoising(pipe) as run:
        expected = frames(pipe, callback_on_step_end=run.step_end)

        def stop(pipe, step, timestep, tensors):
            pipe._interrupt = step == 1
            return run.step_end(pipe, step, timestep, tensors)

        frames(pipe, callback_on_step_end=stop)
        assert run.step == 2 and run.memory_bytes
        assert torch.equal(frames(pipe, callback_on_step_end=run.step_end), expected)
        message = "^WanTransformer3DModel: expected callback_on_step_end=step_end .*, found 8 passes of branch 'cond'"
        with pytest.raises(PatternError, match=message):
            frames(pipe, num_inference_steps=9)
        run.clear()
        with pytest.raises(PatternError, match=r"^step_end: expected step 0 of one pipeline, found step 3$"):
            run.step_end(pipe, 3, None, {})


def test_a_table_of_budgets_is_for_one_network_size_and_number_of_steps(tmp_path):
    pipe, file = pipeline(transformer_2=None, boundary_ratio=None), tmp_path / "table.json"
    expected = frames(pipe)

    def by(**changes):
        stated = {"model": "WanTransformer3DModel", "shape": (16, 3, 12, 16), "tokens": hosts.VIDEO, "steps": 5}
        of_layers = ((1.0, 1.0),) * changes.pop("layers", 2)
        slices.Budgets(**stated | changes, begins=(0,), keep=(of_layers,)).save(file)
        adapter.register(tokens=100, steps={**STEPS, "budgets": str(file)})
        with adapter.denoising(pipe) as run:
            return frames(pipe, callback_on_step_end=run.step_end)

    assert torch.allclose(by(), expected, atol=1e-5)
    wrong = {"model": "Flux", "shape": (16, 3, 12, 18), "steps": 6, "tokens": 145, "layers": 3}
    for name, value in wrong.items():
        with pytest.raises(PatternError, match=rf"^budgets of .*: expected {name} .*, found "):
            by(**{name: value})
    with pytest.raises(ConfigError, match=r"^budgets: expected a table in place of budget, keep, found both$"):
        adapter.register(**FEW, steps={**STEPS, "budgets": str(file)})


@torch.no_grad()
def test_memory_of_kept_lists_is_bounded():
    net, given = network("wan")
    adapter.register(**FEW, steps={**STEPS, "most_bytes": 500})
    message = "^most_bytes: expected at most 500 bytes of kept lists, found 960 with layer 1, branch None; 1 others"
    with adapter.denoising(net), pytest.raises(PatternError, match=message):
        net(**given)


@pytest.mark.parametrize("family", ["wan", pytest.param("cogvideox-5b", marks=pytest.mark.slow)])
@torch.no_grad()
def test_compiled_layers_are_compiled_once_for_all_settings_steps_and_branches(family):
    torch._dynamo.reset()
    net, given = network(family)
    compiled, _ = network(family)
    graphs = []

    def count(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    for block in getattr(compiled, "blocks", None) or compiled.transformer_blocks:
        block.compile(backend=count, fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for share in (0.3, 0.5, 0.2):
            stated = {**FEW, "keep": share, "budget": share}
            for steps in (None, STEPS):
                attention = adapter.register(**stated, steps=steps)
                found = [run_of(each, given, range(3)) for each in (net, compiled)]
                assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
                # Of both networks: layers, branches and steps.
                assert attention.calls["slices"] == 2 * 2 * 2 * 3
            if share == 0.3:
                made = len(graphs)
    assert len(graphs) == made <= 4
    assert all("slices_named" in graph for graph in graphs)


def run_of(net, given, steps):
    """What a network gives at some steps, with the prompt and without."""
    found = []
    with adapter.denoising(net) as run:
        for step in steps:
            for branch in ("cond", "uncond"):
                with net.cache_context(branch):
                    found.append(net(**given)[0])
            run.step_end(None, step, None, {})
    return found


@torch.no_grad()
def test_what_a_network_cannot_have_is_refused_and_it_stays_as_it_was():
    net, given = network("flux")
    expected = net(**given)[0]
    with pytest.raises(ConfigError, match=r"^name: expected a registered backend, found 'nobodys'; known: "):
        adapter.denoising(net, "nobodys").__enter__()
    adapter.register(**ALL, dense=["first_frame"])
    message = "^FluxTransformer2DModel: expected dense tokens that it has by name, text, found 'first_frame'$"
    with pytest.raises(ConfigError, match=message):
        adapter.denoising(net).__enter__()
    small, _ = network("wan", attention_head_dim=32)
    adapter.register(**ALL)
    with pytest.raises(ConfigError, match=r"^WanTransformer3DModel: expected heads of 64 or 128, found 32$"):
        adapter.denoising(small).__enter__()
    with pytest.raises(ConfigError, match=r"^WanTransformer3DModel: expected float32, .*, found torch.float64$"):
        adapter.denoising(network("wan")[0].double()).__enter__()
    with pytest.raises(ConfigError, match=r"^Linear: expected attention with processors, found none$"):
        adapter.denoising(torch.nn.Linear(2, 2)).__enter__()
    with pytest.raises(ConfigError, match=r"^object: expected a network, or a pipeline with one of transformer, trans"):
        adapter.denoising(object()).__enter__()
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(_denoising.FAMILIES, "FluxTransformer2DModel")
        message = "^FluxTransformer2DModel: expected first or last, as its text is not known, .*; classes known: Wan"
        with pytest.raises(ConfigError, match=message):
            adapter.denoising(net).__enter__()
        attention = adapter.register(**ALL, first=hosts.TEXT)
        with adapter.denoising(net):
            assert torch.allclose(net(**given)[0], expected, atol=1e-5) and attention.calls == {"slices": 2}
            with pytest.raises(
                ConfigError, match=r"^name: expected a backend outside of denoising, found 'tilewright_sl"
            ):
                adapter.register(**FEW)
    assert not net._forward_pre_hooks and torch.equal(net(**given)[0], expected)


@pytest.mark.parametrize("name", ["native", "Slices", ""])
def test_a_backend_has_a_name_of_its_own(name):
    with pytest.raises(ConfigError, match=f"a name that diffusers does not use, found '{name}'"):
        adapter.register(name)


def test_wrong_settings_enter_nothing():
    with pytest.raises(ConfigError, match="unknown field"):
        adapter.register("other", kept=0.3)
    assert "other" not in [backend.value for backend in dispatch.AttentionBackendName]


def test_other_dispatchers_are_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "dispatch_attention_fn", lambda query, key, value, backend: query)
    with pytest.raises(Unavailable, match=r"0\.35, 0\.40 and 0\.42, found another: what is entered is not called"):
        adapter.register("other")
    monkeypatch.delattr(dispatch, "_AttentionBackendRegistry")
    with pytest.raises(Unavailable, match=r"found another: module .* has no attribute '_AttentionBackendRegistry'"):
        adapter.register("other")


@torch.no_grad()
def test_log_sum_exps_are_returned():
    adapter.register("with-sums", **ALL)
    call = dispatch._AttentionBackendRegistry._backends["with-sums"]
    q, k, v = (hosts.random(2, 144, 2, 64, seed=seed) for seed in range(3))
    expected, sums = slices.dense(*(x.transpose(1, 2) for x in (q, k, v)))
    for keys in (144, 50):
        out, lse = call(q, k[:, :keys], v[:, :keys], return_lse=True)
        assert lse.shape == (2, 144, 2)
    out, lse = call(q, k, v, return_lse=True)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, sums.transpose(1, 2), rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match=r"^log-sum-exps: expected a call without a mask and dropout, found others"):
        call(q, k, v, dropout_p=0.5, return_lse=True)


# On the ranks.


def shared_out(family, stated, config, more):
    """What each process gives, and the queries that it attended with."""
    import torch.distributed as dist

    # diffusers asks for devices other than a CPU.
    torch.accelerator.device_count = lambda: 1
    stated = stated[dist.get_rank()] if isinstance(stated, list) else stated
    adapter.register(**stated)
    net, given = network(family, **more)
    lengths, attend = [], _context_parallel.attend

    def spy(dispatch, name, attention, q, *others, **named):
        lengths.append(q.shape[1])
        return attend(dispatch, name, attention, q, *others, **named)

    _context_parallel.attend = spy
    try:
        with torch.set_grad_enabled(bool(more.pop("gradient", False))), adapter.denoising(net):
            net.enable_parallelism(config=diffusers.ContextParallelConfig(**config))
            return net(**given)[0], lengths
    finally:
        _context_parallel.attend = attend


# Each process loads diffusers. `tests/slices/test_parallel.py` guards what they share by default.
@pytest.fixture(
    scope="module", params=[pytest.param(number, marks=pytest.mark.slow) for number in (2, 3)], ids=lambda n: f"P{n}"
)
def ranks(request, tmp_path_factory):
    if not PARALLEL:
        pytest.skip(f"diffusers {diffusers.__version__} has no context parallelism")
    found = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    found.number = request.param
    yield found
    found.close()


@pytest.mark.parametrize("anything", [False, True], ids=["equal", "anything"])
@pytest.mark.parametrize("form", ["ulysses", "ring"])
def test_processes_that_share_tokens_attend_as_one(ranks, form, anything):
    config = {f"{form}_degree": ranks.number} | ({f"{form}_anything": True} if anything else {})
    # Three processes share no 20 tokens of text.
    families = ("wan",) if ranks.number == 3 or anything else ("wan", "qwen-image")
    for family in families:
        # 72 or 48 queries of a process are no whole groups of 32.
        more = {"num_attention_heads": 6}
        adapter.register(**FEW)
        net, given = network(family, **more)
        with torch.no_grad(), adapter.denoising(net):
            expected = net(**given)[0]
        tokens = (hosts.VIDEO + (hosts.TEXT if family == "qwen-image" else 0)) // ranks.number
        for found, lengths in ranks.results(shared_out, family, FEW, config, more):
            assert torch.allclose(found, expected, atol=1e-5) and lengths == [tokens] * 2


def test_processes_that_disagree_are_told(ranks):
    stated = [FEW] * (ranks.number - 1) + [{**FEW, "keep": 0.2}]
    config = {"ulysses_degree": ranks.number}
    for found in ranks.run(shared_out, "wan", stated, config, {"num_attention_heads": 6}):
        assert isinstance(found, ConfigError) and str(found) == (
            "tilewright_slices: expected the same keep on all processes, found 0.3 on process 0 and 0.2 on process "
            f"{ranks.number - 1}"
        )


@pytest.mark.parametrize(
    ("more", "config", "message"),
    [
        (
            {"num_attention_heads": 5},
            "ulysses_degree",
            r"expected heads that \d processes can share, found 5",
        ),
        ({"num_attention_heads": 6, "gradient": True}, "ring_degree", "expected no gradient with a parallel configur"),
    ],
)
def test_what_cannot_be_shared_is_refused(ranks, more, config, message):
    for found in ranks.run(shared_out, "wan", FEW, {config: ranks.number}, more):
        with pytest.raises(ConfigError, match=f"^tilewright_slices: {message}"):
            raise found
