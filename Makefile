# `make demo` and `make test` are all that a fresh machine with Python 3.11 or newer needs; both install first.
# Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
# A copy of the lock that was installed. It is empty while pip runs, so an interrupted install is seen, and repeated.
INSTALLED := $(VENV)/installed.lock

# An environment made by a Python that has been removed or replaced since does not start, or does not find its pip.
VENV_WORKS := $(VENV)/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
VENV_UNFINISHED := { [ -e $(INSTALLED) ] && [ ! -s $(INSTALLED) ]; }

.PHONY: install demo test lint

install:
	@if cmp -s requirements.lock $(INSTALLED) && $(VENV_WORKS); then exit 0; fi; \
	set -e; \
	if ! $(VENV_WORKS) || $(VENV_UNFINISHED); then \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			echo "Python 3.11 or newer is needed and '$(PYTHON)' is not one: name one, as in 'make install PYTHON=python3.12'." >&2; \
			exit 1; }; \
		echo "Making $(VENV) with $$($(PYTHON) --version)."; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi; \
	echo "Installing requirements.lock into $(VENV): some minutes, and 6 GB with the CUDA libraries of the Linux build."; \
	: > $(INSTALLED); \
	$(VENV)/bin/python -m pip install --disable-pip-version-check --requirement requirements.lock; \
	cp requirements.lock $(INSTALLED)

demo: install
	$(VENV)/bin/python main.py

# Two processes, a file each at a time; the tests themselves use one thread.
test: install
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile

lint: install
	$(VENV)/bin/python -m ruff check .
