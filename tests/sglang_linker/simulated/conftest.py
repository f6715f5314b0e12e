"""The simulated GPU. Runs where its packages are, with or without SGLang: no test here imports it."""

from tests.cudasim.fixtures import gpu, kvikio, simulator  # noqa: F401
from tests.sglang_linker.simulated.rig import rig  # noqa: F401
from tests.store.device_helpers import device_store  # noqa: F401
