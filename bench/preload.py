"""What every reader process has imported already: it is a fork of a process that did."""

import numpy  # noqa: F401
import torch  # noqa: F401
import zmq  # noqa: F401

import bench.systems.busync_  # noqa: F401
import busync  # noqa: F401
