"""Hydra entry point: compose the configuration, dispatch a mode. `python main.py --help` says what there is."""

import sys
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

import config as configuration
import pipeline
from config import SCHEMAS, Config, SettingError
from train import NonFiniteLoss

store = ConfigStore.instance()
store.store("schema", Config)
for group, name, node in SCHEMAS:
    store.store(name, node, group)


@hydra.main(config_path=str(Path(__file__).resolve().parent / "configs"), config_name="config", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Runs one configuration: one line and a non-zero exit where a setting cannot work."""
    try:
        OmegaConf.resolve(composed)
        missing = OmegaConf.missing_keys(composed)
        configuration.require(not missing, f"{', '.join(sorted(missing))} must be set")
        config = OmegaConf.to_object(composed)
        typed = HydraConfig.get().overrides.task
        configuration.check_typed(config, typed)
        pipeline.run(configuration.resolve(configuration.with_trained_settings(config, typed)))
    except (SettingError, NonFiniteLoss) as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise  # the sweep goes on with its other runs
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
