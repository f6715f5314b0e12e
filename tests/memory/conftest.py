"""The simulated GPU, for the tests of device memory."""

from tests.cudasim.fixtures import gpu, simulator  # noqa: F401
