"""Fills a model's parameters: from safetensors files, or with dummies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from server.errors import UserError
from server.layers.linear import Linear
from server.layers.norm import RMSNorm
from server.models.decoder import CausalLM
from server.models.registry import checkpoint_files

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_DUMMY_STD = 0.02  # the `initializer_range` that all supported families publish: keeps logits finite at any depth


@dataclass(frozen=True, slots=True)
class _Target:
    """Rows of a parameter that one checkpoint tensor fills."""

    parameter: torch.Tensor
    start: int
    rows: int

    @property
    def view(self) -> torch.Tensor:
        return self.parameter.narrow(0, self.start, self.rows)


def load_weights(model: CausalLM, path: Path, progress: Progress | None = None) -> int:
    """Read the checkpoint in folder `path` into `model`, on its device and in its precision; returns bytes filled.

    Files are mapped into memory and each tensor goes straight to the device. Raises UserError, naming file and
    tensor, when one is missing, left over, damaged or of another shape than `config.json` says.
    """
    targets = dict(_targets(model))
    missing = set(targets)
    total = sum(t.view.nbytes for t in targets.values())
    done = 0
    for file in checkpoint_files(path):
        try:
            with safe_open(file, framework="pt", device=str(next(model.parameters()).device)) as reader:
                for name in reader.keys():  # noqa: SIM118 - not a mapping
                    target = targets.get(name)
                    if target is None:
                        if not _may_be_left_over(name, model):
                            raise UserError(f"{file}: tensor {name} has no place in a {model.config.architecture}")
                        continue
                    tensor = reader.get_tensor(name)
                    _check(tensor, target, name, file)
                    target.view.copy_(tensor)
                    missing.discard(name)
                    done += target.view.nbytes
                    if progress is not None:
                        progress(done, total)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: not a readable safetensors file ({error})") from None
    if missing:
        first = min(missing)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{path}: the checkpoint has no tensor {first}{more}")
    return done


def _targets(model: CausalLM) -> Iterator[tuple[str, _Target]]:
    """Checkpoint tensor name -> where it goes, for every parameter once."""
    for prefix, module in model.named_modules():
        if prefix == "lm_head" and model.config.tie_word_embeddings:
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if isinstance(module, Linear) and module.parts is not None:
                parent = prefix.rpartition(".")[0]
                start = 0
                for part, rows in module.parts.items():
                    yield f"{parent}.{part}.{kind}", _Target(parameter, start, rows)
                    start += rows
            else:
                yield f"{prefix}.{kind}", _Target(parameter, 0, parameter.shape[0])


def _may_be_left_over(name: str, model: CausalLM) -> bool:
    # Old checkpoints store the rotary frequencies; some with tied embeddings store the head as well.
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and model.config.tie_word_embeddings)


def _check(tensor: torch.Tensor, target: _Target, name: str, file: Path) -> None:
    if tensor.shape != target.view.shape:
        found, wanted = tuple(tensor.shape), tuple(target.view.shape)
        raise UserError(f"{file}: tensor {name} has shape {found}, but config.json implies {wanted}")
    if not tensor.is_floating_point():
        raise UserError(f"{file}: tensor {name} holds {tensor.dtype}; quantised checkpoints are not supported")


def fill_dummy_weights(model: CausalLM, seed: int) -> int:
    """Fill `model` with seeded random numbers on its device (norms with ones); returns bytes filled.

    The same seed gives the same weights on the same kind of device.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    done = 0
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if isinstance(module, RMSNorm):
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, _DUMMY_STD, generator=generator)
                done += parameter.nbytes
    return done
