"""A sweep whose runs do not depend on each other: all of them are tried, and the failed ones are named at the end.

Hydra accepts a sweeper only from the namespace `hydra_plugins`, hence this folder (without __init__.py, so that launchers that
are installed beside it are found too).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher


class SurvivingSweeper(BasicSweeper):
    """Hydra's own sweeper, with any launcher, but it ends with a list of all failures instead of raising the first."""

    def setup(self, **context: Any) -> None:
        """See hydra.plugins.sweeper.Sweeper."""
        super().setup(**context)
        self.launcher = CollectingLauncher(self.launcher)

    def sweep(self, arguments: list[str]) -> None:
        """Launches every combination of the sweep's parameters.

        Raises:
            SystemExit: before the first run, if the sweep's folder cannot be written; after the last one, if any failed.
        """
        folder = Path(self.config.hydra.sweep.dir)
        try:  # as Hydra does without a word of its own
            folder.mkdir(parents=True, exist_ok=True)
            open(folder / "multirun.yaml", "a").close()
        except OSError as error:
            sys.exit(f"error: the sweep's folder {folder} cannot be written ({error.strerror}): set out= to another one")
        super().sweep(arguments)
        failures, total = self.launcher.failures, self.launcher.launched
        if failures:
            lines = "\n".join(f"  {' '.join(job.overrides)}: {reason(job._return_value)}" for job in failures)
            sys.exit(f"error: {len(failures)} of {total} runs failed; the same command tries them again:\n{lines}")


def reason(error: BaseException) -> str:
    """Returns an error's message, with its kind where that would say little."""
    return str(error) if " " in str(error) else repr(error)


class CollectingLauncher:
    """Passes jobs on to a launcher, keeps what failed and returns what did not."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.launched = 0
        self.failures: list[JobReturn] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """See hydra.plugins.launcher.Launcher."""
        jobs = self.launcher.launch(job_overrides, initial_job_idx=initial_job_idx)
        self.launched += len(jobs)
        self.failures += [job for job in jobs if job.status != JobStatus.COMPLETED]
        return [job for job in jobs if job.status == JobStatus.COMPLETED]
