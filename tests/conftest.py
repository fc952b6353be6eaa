"""Shapes are checked at run time in all tests: what a signature says (`Float[Tensor, "*b n_q d"]`) is what must go in and come out.

A test of the library's own errors switches that off, for otherwise the shape check would speak first:

    @pytest.mark.usefixtures("no_shape_check")      # on a test, a class, or as `pytestmark` on a file
"""
import os
from pathlib import Path

import jaxtyping
import pytest
import torch

# Triton decides when it is imported whether kernels are compiled or interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Before anything imports the package: its modules are wrapped as they are loaded, also those loaded lazily.
jaxtyping.install_import_hook("attention_course", "beartype.beartype")

import attention_course

# tools/test_wheel.py says where the installed wheel lies; a checkout that gets in front of it would make its run worthless.
if installed := os.environ.get("TEST_INSTALLED"):
    assert Path(attention_course.__file__).is_relative_to(installed), (
        f"the tests would see {attention_course.__file__}, not the wheel in {installed}")


def pytest_collection_modifyitems(items):
    "On the wheel, the first setting of each test: all of them have run on the checkout, where the same code lies."
    if os.environ.get("TEST_INSTALLED"):
        firsts = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        items[:] = reversed(firsts.values())


@pytest.fixture
def no_shape_check():
    "The package as its users have it: no run-time shape checks, only its own."
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def compiled(no_shape_check):
    "Compiles without a graph break; when the test is over, one graph was made for the first length and one for all others."
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    yield lambda f: torch.compile(f, backend=backend, fullgraph=True)
    assert 1 <= len(graphs) <= 2
