"""Tensor and pipeline parallelism: each of several processes has some heads of some layers."""
