"""The published DoGE code's own step, run from a checkout of it; nothing of it is copied here.

The checkout does not import as it stands: one file is in no commit, one name is not defined, and
its transformers is years old. So the top level of its `src/trainer.py` is run statement by
statement. A name that cannot be imported becomes an empty class, which is enough for what only
mentions it. What we then call is the code's own `train_step_distributed`, on an object that has
the attributes that its constructor would have set.
"""

import ast
import importlib
import shutil
import sys
import tempfile
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models

MODULE = "published_doge_trainer"
# The checkout's own modules: what breaks, and nothing that a step calls.
OWN_MODULES = ("dataloader", "eval_datasets", "models", "data")
# Of config/doge.json; a clip that is computed and never active, so that gradients compare.
DW_MIN, DW_MAX, MU, MAX_GRAD_NORM = 0.0, 5.0, 0.01, 1e9


class Stand(type):
    """Makes the classes that stand for what could not be imported."""

    def __getattr__(cls, name: str) -> Any:
        """Anything may be called and does nothing: loggers are among what is missing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def load(checkout: Path) -> ModuleType:
    """The module `src/trainer.py` of a checkout, with what of it can be run.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: its DoGETrainer cannot be defined.
    """
    path = checkout / "src" / "trainer.py"
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    module = ModuleType(MODULE)
    # Dataclasses look up the module of their class.
    sys.modules[MODULE] = module
    failures = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for statement in tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                _bind(statement, module)
                continue
            code = compile(ast.Module([statement], []), str(path), "exec")
            try:
                exec(code, module.__dict__)
            except Exception as failure:
                failures.append(f"line {statement.lineno}: {type(failure).__name__}: {failure}")
    if not hasattr(module, "DoGETrainer"):
        raise RuntimeError(f"{path} defines no DoGETrainer here; {'; '.join(failures)}")
    return module


def _bind(statement: ast.Import | ast.ImportFrom, module: ModuleType) -> None:
    for alias in statement.names:
        if isinstance(statement, ast.Import):
            source, attribute = alias.name, None
            bound = alias.asname or alias.name.split(".")[0]
        else:
            source, attribute = statement.module or "", alias.name
            bound = alias.asname or alias.name
        try:
            found = _imported(source, attribute, whole=bool(alias.asname))
        except Exception:
            found = Stand(bound, (), {})
        setattr(module, bound, found)


def _imported(source: str, attribute: str | None, *, whole: bool) -> Any:
    # A run must not speak to a server, whatever is installed.
    if source.split(".")[0] in (*OWN_MODULES, "wandb"):
        raise ImportError(source)
    found = importlib.import_module(source)
    if attribute is not None:
        return getattr(found, attribute)
    return found if whole else sys.modules[source.split(".")[0]]


class Adapted(nn.Module):
    """Our model with the arguments and results of the checkout's."""

    def __init__(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.autocast = autocast

    def forward(self, input_ids: Tensor, **_: Any) -> dict[str, Tensor]:
        """{"loss": mean next-token loss}."""
        return {"loss": models.loss_of(self.model, input_ids, self.autocast)}


def trainer(module: ModuleType, model: nn.Module, num_domains: int, lr: float) -> Any:
    """A DoGETrainer that its constructor has not seen, ready for `train_step_distributed`.

    Every training domain is a target. Its two pickles a step go to a temporary folder.
    """
    made = object.__new__(module.DoGETrainer)
    folder = tempfile.mkdtemp(prefix="published-doge-")
    weakref.finalize(made, shutil.rmtree, folder, ignore_errors=True)
    names = [f"domain{k}" for k in range(num_domains)]
    ids = torch.arange(num_domains)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    attributes = {
        "model": model,
        "args": SimpleNamespace(
            world_size=1,
            n_gpu=1,
            past_index=-1,
            gradient_accumulation_steps=1,
            max_grad_norm=MAX_GRAD_NORM,
        ),
        "accelerator": SimpleNamespace(backward=lambda loss, **options: loss.backward(**options)),
        "lr_scheduler": SimpleNamespace(get_last_lr=lambda: [lr]),
        "compute_loss_context_manager": nullcontext,
        "label_smoother": None,
        "use_apex": False,
        "domain_config": SimpleNamespace(train_ids=ids, tgt_ids=ids),
        "domain_list": names,
        "idx2domain": dict(enumerate(names)),
        "train_ids": ids,
        "tgt_ids": ids.clone(),
        "train_dw": torch.full((num_domains,), 1 / num_domains),
        "avg_dw": torch.zeros(num_domains),
        "dw_min": DW_MIN,
        "dw_max": DW_MAX,
        "mu": MU,
        "reweight_eps": 0.0,
        "dw_update_steps": 0,
        "domain_update_counter": dict.fromkeys(range(num_domains), 0),
        "grad_acc_step": 0,
        "iter_domain_losses": torch.zeros(num_domains),
        "flat_grad_mat": torch.zeros(num_domains, num_params),
        "selected_modules": None,
        "last_dw_save_path": str(Path(folder) / "last.pkl"),
        "avg_dw_save_path": str(Path(folder) / "average.pkl"),
    }
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def inputs(batches: dict[str, Tensor]) -> dict[str, Tensor]:
    """All domains' sequences in one batch, with the column that tells them apart."""
    counts = torch.tensor([len(tokens) for tokens in batches.values()])
    ids = torch.arange(len(batches)).repeat_interleave(counts)
    tokens = torch.cat(list(batches.values()))
    return {"input_ids": tokens, "domain_ids": ids[:, None].to(tokens.device)}
