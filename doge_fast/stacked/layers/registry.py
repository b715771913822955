"""The rules, by the exact class of a module: a subclass may compute something else."""

from torch import nn

from doge_fast.stacked.layers.embedding import EmbeddingRule
from doge_fast.stacked.layers.linear import LinearRule
from doge_fast.stacked.layers.norms import LayerNormRule, LlamaRMSNormRule, RMSNormRule
from doge_fast.stacked.layers.rule import LayerRule

# By name, so that no optional package is imported.
_RULES: dict[str | type[nn.Module], LayerRule] = {
    "torch.nn.modules.linear.Linear": LinearRule(),
    "transformers.pytorch_utils.Conv1D": LinearRule(is_transposed=True),
    "torch.nn.modules.sparse.Embedding": EmbeddingRule(),
    "torch.nn.modules.normalization.LayerNorm": LayerNormRule(),
    "torch.nn.modules.normalization.RMSNorm": RMSNormRule(),
    "transformers.models.llama.modeling_llama.LlamaRMSNorm": LlamaRMSNormRule(),
    "transformers.models.mistral.modeling_mistral.MistralRMSNorm": LlamaRMSNormRule(),
    "transformers.models.qwen2.modeling_qwen2.Qwen2RMSNorm": LlamaRMSNormRule(),
}


def register(module_class: type[nn.Module] | str, rule: LayerRule) -> None:
    """Use `rule` for modules of a class in stacked passes.

    The rule applies in this process, from the next stacked pass on. It replaces an earlier rule of
    the class; subclasses do not inherit it. In a stacked pass modules without a rule run once per
    domain, which is slower, and correct if they treat examples one by one.

    Args:
        module_class: the class, or its full name, "package.module.Class".
        rule: an instance of a subclass of `LayerRule`.
    """
    _RULES[module_class] = rule


def rule_of(module: nn.Module) -> LayerRule | None:
    """The rule of the module's class; None if there is none, or it does not apply to this module.

    A rule does not apply if the module's forward was replaced, or if `LayerRule.covers` is False.
    """
    cls = type(module)
    # The class before its name: a notebook may define the same name twice.
    rule = _RULES.get(cls) or _RULES.get(f"{cls.__module__}.{cls.__qualname__}")
    if rule is None or "forward" in module.__dict__ or not rule.covers(module):
        return None
    return rule
