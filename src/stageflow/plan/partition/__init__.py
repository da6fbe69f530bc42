"""Cutting measured blocks into stages, exactly. No torch: numbers in, numbers out.

block       blocks, devices, shared weights
model       what a stage of them takes: seconds, bytes, the model of a step
chain       blocks in a row
graph       blocks in a DAG
frontier    the search both share
partition   what comes out
refuse      what is said when nothing fits
"""

from stageflow.plan.partition.block import Block, Device, Tie
from stageflow.plan.partition.chain import split_chain
from stageflow.plan.partition.graph import split_graph
from stageflow.plan.partition.partition import Partition

__all__ = ["Block", "Device", "Partition", "Tie", "split_chain", "split_graph"]
