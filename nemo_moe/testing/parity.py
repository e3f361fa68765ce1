"""Parallel equals serial: a tiny Qwen3-MoE trained for a few SGD steps in one plain process and on the ranks of a mesh.

It is shipped, so that it can be run on a cluster as it is there: every rank of an initialised process group calls
`run_rank(setting)`, and rank 0 hands what it gets to `check_outcome`.

The reference knows nothing of ranks: no parallelize, no FSDP, the whole batch at once, torch's own cross-entropy and
norm. Both sides start from `init_weights`, so a rank that starts from other weights shows too.

M micro-batches, W data-parallel ranks, B rows, S positions, N MoE layers, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from nemo_moe.config import BackendConfig, RouterConfig
from nemo_moe.distributed.grad_norm import clip_grad_norm_
from nemo_moe.distributed.mesh import Meshes, MeshSizes, build_meshes
from nemo_moe.distributed.parallelize import init_weights, parallelize, set_last_micro_batch
from nemo_moe.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from nemo_moe.moe.load_balance import load_balance_loss, router_z_loss, sum_over_ranks
from nemo_moe.testing.tolerances import assert_all_close_relative

VOCAB, ROWS, LENGTH = 64, 2, 10
Rows = tuple[Tensor, Tensor, Tensor]  # input_ids, labels, token_mask, each [B, S]


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        mesh: (dp_replicate, fsdp, ep).
        batch: "equal"; "unequal" rows of many lengths, labels on some; "empty_rank": the last rank has padding only;
            "no_labels_rank": the last rank has tokens but no labels; "repeated": every micro-batch is the same.
        routing: "learnt"; "hot": expert 5 is always chosen; "two": only experts 0 and 1 are.
        accumulation: M; the step's rows are the same for every M that divides 4.
        evaluate: the ranks run a forward without gradients after every step; it must change nothing.
    """

    mesh: tuple[int, int, int] = (1, 2, 2)
    experts: str = "loop"
    batch: str = "unequal"
    routing: str = "learnt"
    num_experts: int = 8
    top_k: int = 2
    accumulation: int = 1
    checkpointing: str = "none"
    aux_coef: float = 0.02
    z_coef: float = 0.001
    main_loss: bool = True
    tied: bool = False
    evaluate: bool = False
    steps: int = 3
    learning_rate: float = 0.5
    precision: str = "fp32"
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        return self.mesh[0] * self.mesh[1]

    def reference(self) -> Setting:
        """What this must equal: the same for all meshes, checkpointing and experts backends."""
        return dataclasses.replace(self, experts="loop", checkpointing="none", mesh=(1, self.world_size, 1), evaluate=False, device="cpu")


@dataclass
class Outcome:
    """What a run did. Tensors are whole (not sharded), fp32, on the CPU.

    Attributes:
        losses, grad_norms: of each step.
        gradients: by parameter name, of the first step.
        weights: after the last step.
        tokens_per_expert: [N, E] of all steps and ranks.
        crossed: slots of each rank, first step, whose expert another rank owns.
        selections, dispatches: how often a gate chose experts, and a dispatcher made a route, on this rank.
    """

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    tokens_per_expert: Tensor
    crossed: list[int]
    selections: int
    dispatches: int


def make_model(setting: Setting) -> Qwen3MoeForCausalLM:
    """Three layers, the middle one dense; on the current default device."""
    config = Qwen3MoeConfig.from_hf(
        {
            "model_type": "qwen3_moe",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": setting.num_experts,
            "num_experts_per_tok": setting.top_k,
            "moe_intermediate_size": 16,
            "norm_topk_prob": setting.top_k > 1,
            "tie_word_embeddings": setting.tied,
        }
    )
    return Qwen3MoeForCausalLM(config, BackendConfig(experts=setting.experts), RouterConfig(bias_update_rate=0.001))


def make_rows(setting: Setting) -> list[list[Rows]]:
    """[M][W] batches. For every accumulation the step holds the same 4 blocks of rows per rank."""
    generator = torch.Generator().manual_seed(7)
    blocks = [[_block(setting, rank, generator) for rank in range(setting.world_size)] for _ in range(4)]
    if setting.batch == "repeated":
        blocks = [blocks[0]] * 4
    merge = 4 // setting.accumulation
    return [
        [_join([blocks[index][rank] for index in range(start, start + merge)]) for rank in range(setting.world_size)]
        for start in range(0, 4, merge)
    ]


def _block(setting: Setting, rank: int, generator: torch.Generator) -> Rows:
    input_ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
    labelled = torch.rand(ROWS, LENGTH, generator=generator) < 0.6
    last = rank == setting.world_size - 1
    if setting.batch in ("equal", "repeated"):
        lengths, labelled = torch.full_like(lengths, LENGTH), torch.ones_like(labelled)
    if setting.batch == "empty_rank" and last:
        lengths = torch.zeros_like(lengths)
    if setting.batch == "no_labels_rank" and last:
        labelled = torch.zeros_like(labelled)
    token_mask = torch.arange(LENGTH) < lengths
    return input_ids, torch.where(token_mask & labelled, input_ids, -100), token_mask


def _join(rows: list[Rows]) -> Rows:
    return torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows]), torch.cat([r[2] for r in rows])


def _label_tokens(rows: list[list[Rows]]) -> int:
    return sum(int((labels[:, 1:] != -100).sum()) for micro_batch in rows for _, labels, _ in micro_batch)


def _set_routing(model: Qwen3MoeForCausalLM, setting: Setting) -> None:
    favoured = {"learnt": [], "hot": [5 % setting.num_experts], "two": [0, 1]}[setting.routing]
    for moe in model.moe_layers():
        assert moe.gate.expert_bias is not None
        moe.gate.expert_bias[favoured] = 100.0


def _step_loss(model: nn.Module, rows: Rows, setting: Setting, label_tokens: int, group: Any) -> tuple[Tensor, Any]:
    input_ids, labels, token_mask = (tensor.to(setting.device) for tensor in rows)
    logits, stats = model(input_ids, token_mask=token_mask)
    main = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum") / label_tokens
    totals = sum_over_ranks(stats, group)
    aux = setting.aux_coef * load_balance_loss(stats, totals) + setting.z_coef * router_z_loss(stats, totals)
    return main * float(setting.main_loss) + aux / setting.accumulation, stats


@functools.cache
def reference_outcome(setting: Setting) -> Outcome:
    """One process, no parallelize; call it with `setting.reference()`, so that many settings share one."""
    torch.set_num_threads(1)
    model = make_model(setting)
    init_weights(model, seed=3, initializer_range=0.2)
    _set_routing(model, setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)
    rows = make_rows(setting)
    label_tokens = _label_tokens(rows)
    outcome = Outcome([], [], {}, {}, torch.zeros(2, setting.num_experts), [], 0, 0)
    for step in range(setting.steps):
        optimizer.zero_grad()
        losses = []
        for micro_batch in rows:
            loss, stats = _step_loss(model, _join(micro_batch), setting, label_tokens, None)
            loss.backward()
            losses.append(loss.item())
            outcome.tokens_per_expert += stats.tokens_per_expert
        outcome.losses.append(sum(losses))
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        outcome.grad_norms.append(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item())
        if step == 0:
            outcome.gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        optimizer.step()
    outcome.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return outcome


@functools.cache
def meshes_of(mesh: tuple[int, int, int], device: str) -> Meshes:
    """One set of groups per mesh and process, however many tests use it."""
    return build_meshes(MeshSizes(dp_replicate=mesh[0], fsdp=mesh[1], ep=mesh[2]), device)


def parallel_model(setting: Setting) -> tuple[Qwen3MoeForCausalLM, Meshes]:
    """As a run builds it: on meta, parallelized, then weights."""
    meshes = meshes_of(setting.mesh, setting.device)
    with torch.device("meta"):
        model = make_model(setting)
    parallelize(
        model, meshes, SimpleNamespace(precision=setting.precision, train=SimpleNamespace(activation_checkpointing=setting.checkpointing))
    )
    model.to_empty(device=meshes.device)
    model.reset_buffers()
    init_weights(model, seed=3, initializer_range=0.2)
    _set_routing(model, setting)
    return model, meshes


def run_rank(setting: Setting) -> Outcome | None:
    """The same training on this rank; the outcome on rank 0, None on the others."""
    model, meshes = parallel_model(setting)
    counters = count_routing(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)
    rows = make_rows(setting)
    label_tokens = _label_tokens(rows)
    outcome = Outcome([], [], {}, {}, torch.zeros(2, setting.num_experts), [], 0, 0)
    for step in range(setting.steps):
        optimizer.zero_grad()
        losses, crossed = torch.zeros((), device=meshes.device), torch.zeros(1, device=meshes.device)
        for index, micro_batch in enumerate(rows):
            set_last_micro_batch(model, index == len(rows) - 1)
            loss, stats = _step_loss(model, micro_batch[meshes.dp_rank], setting, label_tokens, meshes.dp_group)
            loss.backward()
            losses += loss.detach()
            outcome.tokens_per_expert += stats.tokens_per_expert.cpu()
            crossed += _slots_of_other_ranks(model, stats.tokens_per_expert)
        dist.all_reduce(losses)
        outcome.losses.append(losses.item())
        outcome.grad_norms.append(clip_grad_norm_(model, meshes, None).item())
        if step == 0:
            all_crossed = [torch.zeros_like(crossed) for _ in range(dist.get_world_size())]
            dist.all_gather(all_crossed, crossed)
            outcome.crossed = [int(count.item()) for count in all_crossed]
            missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
            assert not missing, f"parameters without a gradient: {missing}"
            outcome.gradients = whole(model, meshes, {name: parameter.grad for name, parameter in model.named_parameters()})
        optimizer.step()
        if setting.evaluate:
            with torch.no_grad():
                model(rows[0][0][0][:1, :5].to(meshes.device))
    outcome.weights = whole(model, meshes, {name: parameter.detach() for name, parameter in model.named_parameters()})
    counts = outcome.tokens_per_expert.to(meshes.device)
    dist.all_reduce(counts)
    outcome.tokens_per_expert = counts.cpu()
    outcome.selections, outcome.dispatches = counters["selections"], counters["dispatches"]
    return outcome if dist.get_rank() == 0 else None


def run_ranks_of_several(settings: list[Setting]) -> list[Outcome | None]:
    return [run_rank(setting) for setting in settings]


def check_outcome(setting: Setting, outcome: Outcome | None, tolerance: float = 1e-5) -> None:
    """Assert that outcome equals the reference of `setting`, that EP sent rows between ranks, and that each micro-batch
    was routed once, recomputed or not."""
    assert outcome is not None, "only rank 0 has an outcome"
    expected = reference_outcome(setting.reference())
    for step, (found, wanted) in enumerate(zip(outcome.losses + outcome.grad_norms, expected.losses + expected.grad_norms, strict=True)):
        assert abs(found - wanted) <= tolerance * abs(wanted), f"losses, then gradient norms: number {step} is {found}, expected {wanted}"
    assert_all_close_relative(outcome.gradients, expected.gradients, tolerance)
    assert_all_close_relative(outcome.weights, expected.weights, tolerance)
    assert outcome.tokens_per_expert.tolist() == expected.tokens_per_expert.tolist()
    assert (sum(outcome.crossed) > 0) == (setting.mesh[2] > 1)
    if setting.batch != "empty_rank" and setting.routing == "learnt" and setting.mesh[2] > 1:
        assert all(outcome.crossed)
    assert outcome.selections == outcome.dispatches == 2 * setting.steps * (setting.accumulation + setting.evaluate)  # 2 MoE layers


def _slots_of_other_ranks(model: Qwen3MoeForCausalLM, tokens_per_expert: Tensor) -> Tensor:
    experts = model.moe_layers()[0].experts
    own = slice(experts.expert_offset, experts.expert_offset + experts.num_local_experts)
    return tokens_per_expert.sum() - tokens_per_expert[:, own].sum()


def whole(model: Qwen3MoeForCausalLM, meshes: Meshes, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Sharded tensors by parameter name -> whole ones with all experts; collective."""
    of_experts = {id(parameter) for moe in model.moe_layers() for parameter in moe.experts.parameters()}
    parameters = dict(model.named_parameters())
    result = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if meshes.ep_group is not None and id(parameters[name]) in of_experts:
            parts = [torch.empty_like(full) for _ in range(meshes.sizes.ep)]
            dist.all_gather(parts, full.contiguous(), group=meshes.ep_group)
            full = torch.cat(parts)
        result[name] = full.float().cpu()
    return result


def count_routing(model: Qwen3MoeForCausalLM) -> dict[str, int]:
    """Counts calls of each gate's selection and of each dispatch manager's dispatch from now on."""
    counters = {"selections": 0, "dispatches": 0}

    def counting(function: Any, name: str) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            counters[name] += 1
            return function(*args)

        return wrapper

    for moe in model.moe_layers():
        moe.gate._select = counting(moe.gate._select, "selections")  # type: ignore[method-assign]
        manager = moe.dispatcher.manager
        manager.dispatch = counting(manager.dispatch, "dispatches")  # type: ignore[method-assign]
    return counters
