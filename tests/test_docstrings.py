"""The examples of the docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tiledops

NAMES = {"jax": jax, "jnp": jnp, "np": np, "tiledops": tiledops, "optax": optax, "nnx": flax.nnx, "linen": flax.linen}
MODULES = {name: importlib.import_module(f"tiledops.{name}") for _, name, _ in pkgutil.iter_modules(tiledops.__path__)}


@pytest.mark.parametrize("name", ["tiledops", *MODULES])
def test_examples(name: str) -> None:
    """Where a module's own docstring calls it by its name, it is the module."""
    module = MODULES.get(name, tiledops)
    assert doctest.testmod(module, extraglobs={name: module, **NAMES}).failed == 0


def test_the_public_interface_has_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in tiledops.__all__:
        public = getattr(tiledops, name)
        if callable(public) and name != "TilePlan":  # what plan_tiles returns: its examples are there
            assert any(test.examples for test in finder.find(public, name, globs={})), f"{name} has no example"
