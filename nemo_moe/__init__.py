"""nemo_moe: fine-tune Mixture-of-Experts models with expert parallelism.

The public names, loaded on first use, so that `import nemo_moe` costs nothing and needs torch alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_moe.availability import is_deepep_loadable as is_deepep_loadable, load_deepep_kernel as load_deepep_kernel
    from nemo_moe.checkpoint.hf import load_hf_folder as load_hf_folder, save_hf_folder as save_hf_folder
    from nemo_moe.compose import ConfigError as ConfigError, load_recipe as load_recipe
    from nemo_moe.config import (
        BackendConfig as BackendConfig,
        MoEConfig as MoEConfig,
        RouterConfig as RouterConfig,
        RunConfig as RunConfig,
    )
    from nemo_moe.distributed.grad_norm import clip_grad_norm_ as clip_grad_norm_
    from nemo_moe.distributed.mesh import MeshSizes as MeshSizes, build_meshes as build_meshes
    from nemo_moe.distributed.parallelize import init_weights as init_weights, parallelize as parallelize
    from nemo_moe.models.qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig, Qwen3MoeForCausalLM as Qwen3MoeForCausalLM
    from nemo_moe.moe.dispatch.buffers import (
        destroy_deepep_buffers as destroy_deepep_buffers,
        reset_hybrid_ep_buffer as reset_hybrid_ep_buffer,
    )
    from nemo_moe.moe.dispatch.deepep import set_deepep_num_sms as set_deepep_num_sms
    from nemo_moe.moe.dispatch.hybridep import init_hybrid_ep_buffer as init_hybrid_ep_buffer
    from nemo_moe.moe.dispatch.token_dispatcher import MoEFlexTokenDispatcher as MoEFlexTokenDispatcher
    from nemo_moe.moe.gate import Gate as Gate
    from nemo_moe.moe.layer import MoE as MoE
    from nemo_moe.registry import (
        DISPATCHERS as DISPATCHERS,
        EXPERTS as EXPERTS,
        MODELS as MODELS,
        DispatcherSpec as DispatcherSpec,
        ExpertsSpec as ExpertsSpec,
        ModelSpec as ModelSpec,
    )
    from nemo_moe.train.finetune import finetune as finetune

__version__ = "0.1.0"

# The same names for the running program; a test compares the two.
_NAMES = {
    "availability": ["is_deepep_loadable", "load_deepep_kernel"],
    "checkpoint.hf": ["load_hf_folder", "save_hf_folder"],
    "compose": ["ConfigError", "load_recipe"],
    "config": ["BackendConfig", "MoEConfig", "RouterConfig", "RunConfig"],
    "distributed.grad_norm": ["clip_grad_norm_"],
    "distributed.mesh": ["MeshSizes", "build_meshes"],
    "distributed.parallelize": ["init_weights", "parallelize"],
    "models.qwen3_moe": ["Qwen3MoeConfig", "Qwen3MoeForCausalLM"],
    "moe.dispatch.buffers": ["destroy_deepep_buffers", "reset_hybrid_ep_buffer"],
    "moe.dispatch.deepep": ["set_deepep_num_sms"],
    "moe.dispatch.hybridep": ["init_hybrid_ep_buffer"],
    "moe.dispatch.token_dispatcher": ["MoEFlexTokenDispatcher"],
    "moe.gate": ["Gate"],
    "moe.layer": ["MoE"],
    "registry": ["DISPATCHERS", "EXPERTS", "MODELS", "DispatcherSpec", "ExpertsSpec", "ModelSpec"],
    "train.finetune": ["finetune"],
}
_MODULE_OF = {name: f"nemo_moe.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'nemo_moe' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, "__version__"])
