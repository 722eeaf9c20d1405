"""Marks of tests that need a CUDA device. Not for children: to ask for a device is to use CUDA, before they fork."""

from __future__ import annotations

import os

import pytest
import torch

EMULATED = "cudaemu" in os.environ.get("LD_PRELOAD", "")
TIMEOUT = 120  #: seconds for a test: each process that uses a GPU needs some until it does

_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
two_devices = pytest.mark.skipif(_count < 2, reason="needs two CUDA devices")
MARKS = [pytest.mark.gpu, pytest.mark.timeout(TIMEOUT)]

#: For tests that run on both. Those on the CPU have the names that they would have without the others.
DEVICES = [pytest.param("cpu", id=pytest.HIDDEN_PARAM), pytest.param("cuda", marks=MARKS)]
