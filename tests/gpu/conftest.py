"""Tests that need a real GPU: they skip, and say why, where there is none."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU and its driver")
