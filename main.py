"""Hydra entry point: compose the configuration, dispatch a mode. `python main.py --help` says what there is."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from torch.distributed import is_torchelastic_launched

import config as configuration
import pipeline
from checkpoint import WriteError
from config import REQUIRED, SCHEMAS, Config, SettingError
from parallel import ProcessLost
from train import NonFiniteLoss, Stopped

OUT_OF_MEMORY = "can't allocate memory|not enough memory|out of memory"  # in the words of torch's allocators

store = ConfigStore.instance()
store.store("schema", Config(sampler=REQUIRED, eval=REQUIRED))  # left open, since each has more than one schema
for group, name, node in SCHEMAS:
    store.store(name, node, group)


@hydra.main(config_path=str(Path(__file__).resolve().parent / "configs"), config_name="config", version_base="1.3")
def main(composed: DictConfig) -> None:
    """Runs one configuration: one line and a non-zero exit where a setting cannot work.

    In a sweep a run that fails raises an ordinary exception, whatever it did, and the sweep goes on; a signal stops it.
    """
    sweeping = HydraConfig.get().mode == RunMode.MULTIRUN
    running = False
    try:
        configuration.require(
            not (sweeping and is_torchelastic_launched()),
            "a sweep (-m) under torchrun: start torchrun once per run, or the sweep with a launcher of Hydra's",
        )
        OmegaConf.resolve(composed)
        missing = OmegaConf.missing_keys(composed)
        configuration.require(not missing, f"{', '.join(sorted(missing))} must be set")
        config = OmegaConf.to_object(composed)
        typed = HydraConfig.get().overrides.task
        configuration.check_typed(config, typed)
        config = configuration.resolve(configuration.with_trained_settings(config, typed))
        running = True
        pipeline.run(config, asked(), wait=sweeping)
    except (SettingError, NonFiniteLoss, WriteError, ProcessLost) as error:
        if sweeping:
            raise
        first = running or os.environ.get("RANK", "0") == "0"  # of several processes, which all read the same settings
        sys.exit(f"error: {error}" if first else 1)
    except (MemoryError, RuntimeError) as error:
        if sweeping or not (isinstance(error, MemoryError) or re.search(OUT_OF_MEMORY, str(error))):
            raise
        reason = str(error).splitlines()[0] if str(error) else "no more memory"
        sys.exit(f"error: out of memory ({reason}): take a smaller model, batch or count; mode=plan says what training needs")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")
    except Stopped:
        raise
    except SystemExit as error:
        if sweeping:
            raise RuntimeError(f"the run exited with {error.code}") from error
        raise


def asked() -> dict[str, Any]:
    """Returns who asks for the run: the table, its scale and version, and every override, typed or from the table's sweep."""
    choices = HydraConfig.get().runtime.choices
    return {
        **{group: choices[group] for group in ("experiment", "scale", "paper", "match")},
        "overrides": list(HydraConfig.get().overrides.task),
    }


if __name__ == "__main__":
    main()
