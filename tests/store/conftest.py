"""The simulated GPU for the tests of the store."""

from tests.cudasim.fixtures import gpu, kvikio, nixl, simulator  # noqa: F401
from tests.store.device_helpers import device_store  # noqa: F401
