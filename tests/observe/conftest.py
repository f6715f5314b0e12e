"""The simulated GPU for the tests of what is counted."""

from tests.cudasim.fixtures import gpu, kvikio, nixl, simulator  # noqa: F401
from tests.store.device_helpers import device_store  # noqa: F401
