"""The decoder in C++: its sources, how they are built and how they are called."""

from engine.native.build import Built, build
from engine.native.library import INSTRUCTION_SETS, Captured, Decoder, Library
from engine.native.structs import Job, StepArrays

__all__ = ["INSTRUCTION_SETS", "Built", "Captured", "Decoder", "Job", "Library", "StepArrays", "build"]
