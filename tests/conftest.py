"""Settings that every test shares; nothing heavy is imported here."""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # two OpenMP threads on a busy two-core machine stall at barriers
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may ask a hub
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each of many child processes would compile all anew

from hypothesis import HealthCheck, settings

# Deadlines measure the machine, not the code; the blob and the seed in the output replay a failure.
settings.register_profile(
    "default", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.register_profile("search", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
sys.dont_write_bytecode = False
