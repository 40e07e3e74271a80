"""Before any of the libraries is imported: nothing is asked of a network, and no thread is started for it."""

import os

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
