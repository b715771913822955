# ruff: noqa: F401
# mypy: implicit-reexport
"""One frozen dataclass per verb: what it is told, and what its run directory repeats.

The command line is made from these classes: a field is a flag, its docstring the help text.
They import nothing heavy, so a configuration can be read where the pipeline is not installed.
"""

from doge_fast.pipeline.config.components import (
    CorpusConfig,
    ModelConfig,
    TasksConfig,
    TrainingConfig,
)
from doge_fast.pipeline.config.experiment import (
    BaseArmsConfig,
    DemoConfig,
    DoReMiArmsConfig,
    Experiment,
    ExperimentConfig,
    Preset,
    ProxyArmsConfig,
    RatesConfig,
    SelectionArmsConfig,
    SwarmArmsConfig,
)
from doge_fast.pipeline.config.stages import (
    BaseConfig,
    DoReMiConfig,
    ProxyConfig,
    SelectConfig,
    StageConfig,
)
from doge_fast.pipeline.config.tools import (
    EvaluateConfig,
    ExportConfig,
    InfoConfig,
    PlanConfig,
    ProfileConfig,
    ReportConfig,
    TargetConfig,
    WeightsAverageConfig,
    WeightsCardConfig,
    WeightsConstrainConfig,
    WeightsDiffConfig,
    WeightsPlotConfig,
    WeightsShowConfig,
)
