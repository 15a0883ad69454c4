"""For every test: no machine but this one is reached, neither from here nor from the processes that tests start."""

import importlib.util
import os
import signal
from pathlib import Path

GUARD = Path(__file__).parent / "loopback_only"
NOWHERE = "http://127.0.0.1:9"  # the discard port: what does not run in Python (wandb's core) finds no way out either


def pytest_configure() -> None:
    spec = importlib.util.spec_from_file_location("loopback_only", GUARD / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(GUARD), *([before] if before else [])])
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        os.environ[name] = NOWHERE
    os.environ |= {"no_proxy": "127.0.0.1,localhost,::1", "NO_PROXY": "127.0.0.1,localhost,::1"}
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        os.environ.pop(name, None)
    # A suite started in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Read when torch is imported. Tensors here are tiny, and several workers share the cores: threads would only wait.
    os.environ["OMP_NUM_THREADS"] = "1"
