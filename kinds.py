"""Which module knows a kind of model: its parts, its objective, its data and its scores."""

from collections.abc import Mapping
from typing import Any

from torch import nn

import classification
import generation
import model
import text
from config import LANGUAGE_MODELS, Config
from hardware import Hardware

# By model.name: what the pipeline asks (check, load, source, plot_partition, measure, sample_sets, evaluate, and where something
# is drawn preview and sample), and what makes the model of its parts (trained_parts, build_module, build_objective, build_model).
KINDS = {"dit": generation, "vit": classification, "noprop_cnn": classification, "transformer": text, "recurrent": text}
BUILDERS = {**KINDS, "dit": model}


def trained_parts(config: Config, block: int) -> list[str]:
    """Returns the parts that a step of a block trains, its own first: that one's count names what is drawn."""
    return BUILDERS[config.model.name].trained_parts(config, block)


def build_module(config: Config, name: str) -> nn.Module:
    """Returns a part's module on the CPU, initialised from the stream (seed, "init/<part>") whatever else exists."""
    return BUILDERS[config.model.name].build_module(config, name)


def build_objective(config: Config) -> Any:
    """Returns the objective that a configuration describes; see model.Objective."""
    return BUILDERS[config.model.name].build_objective(config)


def build_model(config: Config, modules: Mapping[str, nn.Module], scale: float, hardware: Hardware) -> Any:
    """Returns a model to use, of parts' modules by name.

    Args:
        scale: model units per unit of pixels in [-1, 1].
    """
    return BUILDERS[config.model.name].build_model(config, modules, scale, hardware)


def check_use(config: Config, run: Mapping[str, Any]) -> None:
    """Refuses a trained model of which something that its weights do not hold has changed: a language model's tokenizer.

    Args:
        run: the checkpoint's run.json.
    """
    if config.model.name in LANGUAGE_MODELS:
        text.check_tokenizer(config, run["data"]["fingerprint"])
