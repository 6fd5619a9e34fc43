"""Adapters in sharded models: what is trained, sent, held, exported and resumed."""

from __future__ import annotations

import functools
import importlib
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state
from test_llama_weights import filled
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as recompute

from llama import Llama, LlamaConfig
from llama.lora import adapters, add_lora, freeze, init_lora, is_adapter, trainable_parameters
from llama.weights import load_hf, load_meta, load_peft, save_hf, save_meta, save_peft, stored_dtype
from minifsdp import checkpoint, events

ENGINES = ["minifsdp", "torch.distributed.fsdp"]
# On three ranks the rank's 4 rows are 2, 2, 0, and 8 key rows 3, 3, 2.
CONFIG = LlamaConfig(
    dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=20, vocab_size=40, max_seq_len=16
)


def build(
    engine_name: str,
    config: LlamaConfig = CONFIG,
    base_dtype: torch.dtype | None = None,
    weights: str | Path | None = None,
    **settings,
) -> Llama:
    """A model with adapters, built on meta, sharded, filled and with a B that is not zero."""
    engine = importlib.import_module(engine_name)
    with torch.device("meta"):
        model = Llama(config)
    targets = settings.pop("targets", "all-linear")
    add_lora(model, 4, targets=targets, base_dtype=base_dtype)
    if settings.pop("recompute", False):
        for block in model.layers:
            block.forward = functools.partial(recompute, block.forward, use_reentrant=False)
    if settings.pop("offload", False):
        settings["offload_policy"] = engine.CPUOffloadPolicy(pin_memory=False)
    if dtype := settings.pop("param_dtype", None):
        settings["mp_policy"] = engine.MixedPrecisionPolicy(dtype, torch.float32)
    for module in (*model.layers, model.tok_embeddings, model.output, model):
        engine.fully_shard(module, **settings)
    model.to_empty(device="cpu")
    fill(model, weights)
    return model


def plain(config: LlamaConfig = CONFIG, weights: str | Path | None = None) -> Llama:
    """The same model in one process."""
    model = Llama(config)
    add_lora(model, 4, targets="all-linear")
    fill(model, weights)
    return model


def fill(model: Llama, weights: str | Path | None = None) -> None:
    if weights is None:
        model.init_weights(torch.Generator().manual_seed(0))
    else:
        load_hf(model, weights)
    init_lora(model, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            if name.endswith("lora_b.weight"):
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.fill_(0.02)


def tokens(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(40, (rows, 8), generator=torch.Generator().manual_seed(seed))


def train(model: Llama, steps: range, rank: int, world_size: int, optimizer=None) -> list[float]:
    """Losses of steps over a global batch of 4 rows, of which this rank has its share."""
    if optimizer is None:
        optimizer = adamw(model)
    losses = []
    for step in steps:
        batch = tokens(4, seed=step).chunk(world_size)[rank]
        loss = torch.nn.functional.cross_entropy(
            model(batch).float()[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def adamw(model: Llama) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable_parameters(model).values(), lr=1e-2)


def whole(model: Llama) -> dict[str, torch.Tensor]:
    model.reshard()
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


# ---- Training


def _trained(engine_name: str, **settings) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = build(engine_name, **settings)
    losses = train(model, range(3), dist.get_rank(), dist.get_world_size())
    assert all(p.grad is None for p in model.parameters())
    return whole(model), losses


@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_train_adapters_as_one_process_does(run_ranks, engine):
    first, second = run_ranks(2, _trained, engine)
    model = plain()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, range(3), 0, 1)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert not torch.equal(first[0][name], before[name]), name
            assert torch.allclose(first[0][name], parameter, rtol=0, atol=1e-6), name
        else:
            assert torch.equal(first[0][name], before[name]), name
    means = [(a + b) / 2 for a, b in zip(first[1], second[1], strict=True)]
    assert means == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reshard_after_forward": False},
        {"recompute": True},
        {"targets": ["output", "wq", "w2"]},
        {"param_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "base_dtype": torch.bfloat16},
        {"offload": True},
    ],
    ids=str,
)
def test_both_engines_train_adapters_to_the_same_bits(run_ranks, settings):
    def run(engine: str) -> list:
        return run_ranks(3, _trained_with, engine, settings)

    ours, theirs = map(run, ENGINES)
    for (a, losses), (b, their_losses) in zip(ours, theirs, strict=True):
        assert losses == their_losses
        for name in a:
            assert torch.equal(a[name], b[name]), name


def _trained_with(engine: str, settings: dict) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = build(engine, **settings)
    model.output.chunk_bytes = 4 * 40 * 3  # three rows of logits
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = adamw(model)
    losses = []
    for step in range(3):
        batch = tokens(world_size, seed=step)[rank : rank + 1]
        loss = model(batch, targets=batch.roll(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return whole(model), losses


# ---- What is sent and held


def _reduced_bytes() -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that each unit reduced in a step, and those of its adapters' gradients, padded."""
    model, seen = build("minifsdp"), {}

    def note(event: events.Event) -> None:
        if event.kind == "reduce_scatter":
            seen[event.unit] = seen.get(event.unit, 0) + event.nbytes

    with events.listening(note):
        model(tokens(1)).sum().backward()
    padded: dict[str, int] = {}
    world_size = dist.get_world_size()
    for name, parameter in trainable_parameters(model).items():
        unit = ".".join(name.split(".")[:2])
        rows = -(-parameter.shape[0] // world_size) * world_size
        padded[unit] = padded.get(unit, 0) + 4 * rows * parameter.shape[1]
    return seen, padded


@pytest.mark.parametrize("world_size", [2, 3])
def test_only_adapters_gradients_travel(run_ranks, world_size):
    for seen, padded in run_ranks(world_size, _reduced_bytes):
        assert seen == padded
        assert set(seen) == {"layers.0", "layers.1"}


WIDE = LlamaConfig(
    dim=256, n_layers=3, n_heads=2, n_kv_heads=2, ffn_hidden=512, vocab_size=16, max_seq_len=8
)
BLOCK_BYTES = 4 * (4 * 256 * 256 + 3 * 256 * 512)


def _peak_bytes(engine: str, lora: bool) -> int:
    """Bytes of the most held at once in a second step above what was held before it."""
    model = build(engine, WIDE)
    if not lora:
        model.requires_grad_(True)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            model(torch.tensor([[1, 2]])).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
    recorded = seen.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in recorded if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


def test_frozen_matrices_cost_no_gradient_memory(run_ranks):
    """A block in full, which is its frozen matrices, its adapters, and gradients of theirs."""
    adapter_bytes = 4 * 4 * (4 * (256 + 256) + 3 * (256 + 512))
    least = BLOCK_BYTES + adapter_bytes
    for peak in run_ranks(2, _peak_bytes, "minifsdp", True):
        assert least <= peak <= least + 3 * adapter_bytes
    for peak in run_ranks(2, _peak_bytes, "minifsdp", False):
        assert peak > 2 * BLOCK_BYTES


# ---- What the base is stored in


def _computed_and_written(
    engine: str, folder: str, base_dtype: torch.dtype | None, offload: bool
) -> list[torch.Tensor]:
    """Logits and gradients; the model is exported in float32 too."""
    settings = {"param_dtype": torch.bfloat16, "offload": offload, "base_dtype": base_dtype}
    model = build(engine, weights=Path(folder, "base"), **settings)
    stored = {p.dtype for name, p in model.named_parameters() if not is_adapter(name)}
    assert stored == {base_dtype or torch.float32}
    assert {p.dtype for p in trainable_parameters(model).values()} == {torch.float32}
    train(model, range(2), dist.get_rank(), dist.get_world_size())
    save_hf(model, Path(folder, str(base_dtype)), dtype=torch.float32)
    logits = model(tokens(2, seed=dist.get_rank()))
    logits.float().square().mean().backward()
    gradients = [p.grad.to_local() for p in trainable_parameters(model).values()]
    return [logits.detach(), *gradients]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_a_base_stored_as_its_files_are_changes_no_bit_under_mixed_precision(
    tmp_path, run_ranks, engine, stored, offload
):
    save_hf(filled(CONFIG), tmp_path / "base", dtype=stored)
    assert stored_dtype(tmp_path / "base") == stored
    runs = [
        run_ranks(2, _computed_and_written, engine, str(tmp_path), dtype, offload)
        for dtype in (None, stored)
    ]
    for wide, narrow in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wide, narrow, strict=True))
    base, *both = (exported(tmp_path / name) for name in ("base", "None", str(stored)))
    for name, values in both[0].items():
        assert torch.equal(values, both[1][name]), name
        unadapted = name.endswith(("norm.weight", "tok_embeddings.weight", "output.weight"))
        assert torch.equal(values, base[name]) == unadapted, name


# ---- First values, files


def _first_values(engine: str) -> dict[str, torch.Tensor]:
    model = build(engine)
    init_lora(model, torch.Generator().manual_seed(1))
    return whole(model)


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_begin_alike_on_any_number_of_ranks(run_ranks, engine):
    model = plain()
    init_lora(model, torch.Generator().manual_seed(1))
    for world_size in (2, 3):
        for values in run_ranks(world_size, _first_values, engine):
            for name, parameter in model.named_parameters():
                assert torch.equal(values[name], parameter), name


def _write(root: str, engine: str, settings: dict) -> None:
    """Write adapters and sums; training goes on as if nothing had been written."""
    model, alike = build(engine, **settings), build(engine, **settings)
    optimizer, optimizer_alike = adamw(model), adamw(alike)
    before = model(tokens(2)).detach()
    save_peft(model, Path(root, "peft"), "base")
    save_hf(model, Path(root, "hf"))
    save_meta(model, Path(root, "meta"), shards=2, dtype=torch.float64)
    init_lora(model, torch.Generator().manual_seed(2))
    load_peft(model, Path(root, "peft"))
    assert torch.equal(model(tokens(2)), before)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = (rank, world_size) if world_size < 3 else (0, 1)  # of 4 rows
    losses = train(model, range(2), *share, optimizer)
    assert losses == train(alike, range(2), *share, optimizer_alike)
    one, other = whole(model), whole(alike)
    assert all(torch.equal(one[name], other[name]) for name in one)


def _write_on_two_axes(root: str, engine: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "rows"))
    _write(root, engine, {"mesh": mesh})


def assert_written(folder: Path) -> None:
    """The folder has what one process writes."""
    model = plain()
    before = model(tokens(2)).detach()
    save_peft(model, folder / "one" / "peft", "base")
    save_hf(model, folder / "one" / "hf")
    for path in (folder / "one" / "peft").iterdir():
        assert (folder / "peft" / path.name).read_bytes() == path.read_bytes()
    expected = exported(folder / "one" / "hf")
    for kind in ("hf", "meta"):
        for name, values in exported(folder / kind).items():
            if name in {f"{path}.weight" for path in adapters(model)}:
                assert torch.allclose(values, expected[name], rtol=0, atol=1e-7), name
                assert not torch.equal(values, model.get_parameter(name)), name
            else:
                assert torch.equal(values, expected[name]), name
    loaded = Llama(CONFIG)
    load_hf(loaded, folder / "hf")
    assert torch.allclose(loaded(tokens(2)), before, rtol=0, atol=1e-5)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of an export in float32, by our names; Meta's files or Hugging Face's."""
    model = Llama(CONFIG)
    (load_meta if (folder / "params.json").exists() else load_hf)(model, folder)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (3, {"offload": True}),
        (2, {"reshard_after_forward": False}),
    ],
    ids=str,
)
def test_ranks_write_the_adapters_and_the_sums_that_one_process_writes(
    tmp_path, run_ranks, engine, world_size, settings
):
    run_ranks(world_size, _write, str(tmp_path), engine, settings)
    assert_written(tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
def test_replicas_write_the_sums_of_their_rows(tmp_path, run_ranks, engine):
    run_ranks(4, _write_on_two_axes, str(tmp_path), engine)
    assert_written(tmp_path)


def _write_alone(root: str) -> None:
    """Rank 0 writes a plain model; a collective that it entered would be met by none."""
    model = plain()
    if dist.get_rank() == 0:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            save_peft(model, Path(root, "peft"), "base")
            save_hf(model, Path(root, "hf"))
            save_meta(model, Path(root, "meta"))
        assert not [event.key for event in seen.key_averages() if "gloo" in event.key]
    dist.barrier()


def test_one_rank_alone_writes_a_plain_model(tmp_path, run_ranks):
    run_ranks(2, _write_alone, str(tmp_path))
    assert_written(tmp_path)


def _refusals(engine_name: str) -> None:
    with torch.device("meta"):
        model = Llama(CONFIG)
    importlib.import_module(engine_name).fully_shard(model)
    with pytest.raises(ValueError, match="sharded already: call add_lora before fully_shard"):
        add_lora(model, 2)
    with pytest.raises(ValueError, match="sharded already: cast it before fully_shard"):
        freeze(model, torch.bfloat16)
    freeze(model)
    assert not trainable_parameters(model)


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters_come_before_sharding_and_so_does_casting(run_ranks, engine):
    run_ranks(1, _refusals, engine)


def _load_into_meta(root: str, engine_name: str) -> torch.Tensor:
    engine = importlib.import_module(engine_name)
    with torch.device("meta"):
        model = Llama(CONFIG)
    add_lora(model, 4, targets="all-linear")
    for module in (*model.layers, model):
        engine.fully_shard(module)
    load_hf(model, Path(root, "base"))
    load_peft(model, Path(root, "peft"))
    return model(tokens(2)).detach()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sharded_model_on_meta_gets_memory_as_base_and_adapters_load(tmp_path, run_ranks, engine):
    save_hf(filled(CONFIG), tmp_path / "base")
    model = plain()
    save_peft(model, tmp_path / "peft")
    for logits in run_ranks(3, _load_into_meta, str(tmp_path), engine):
        assert torch.allclose(logits, model(tokens(2)), atol=1e-6)


# ---- Checkpoints


def _state(model: Llama, optimizer: torch.optim.Optimizer) -> dict:
    options = torch_state.StateDictOptions(ignore_frozen_params=True)
    return {
        "model": torch_state.get_model_state_dict(model, options=options),
        "optimizer": torch_state.get_optimizer_state_dict(model, optimizer, options=options),
    }


def _resumed(root: str, engine: str) -> list[str]:
    """Which parameters differ after 4 steps, and after 2, a restart and 2 more."""
    rank, world_size, folder = dist.get_rank(), dist.get_world_size(), Path(root, engine)
    model = build(engine)
    optimizer = adamw(model)
    train(model, range(2), rank, world_size, optimizer)
    state = _state(model, optimizer)
    checkpoint.save(folder, 2, state)
    losses = train(model, range(2, 4), rank, world_size, optimizer)

    again = build(engine)
    optimizer = adamw(again)
    fresh = _state(again, optimizer)
    checkpoint.load(folder, fresh)
    options = torch_state.StateDictOptions(strict=False)
    torch_state.set_model_state_dict(again, fresh["model"], options=options)
    torch_state.set_optimizer_state_dict(again, optimizer, fresh["optimizer"], options=options)
    losses_again = train(again, range(2, 4), rank, world_size, optimizer)
    assert losses_again == losses
    names = set(trainable_parameters(model))
    assert set(state["model"]) == names == set(state["optimizer"]["state"])
    one, other = whole(model), whole(again)
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_of_the_adapters_alone_resumes_to_the_same_bits(tmp_path, run_ranks, engine):
    assert run_ranks(2, _resumed, str(tmp_path), engine) == [[], []]
