"""The decoder in C++: its sources, how they are built and how they are called."""

from engine.native.build import Built, build
from engine.native.library import INSTRUCTION_SETS, Decoder, Library, StepArrays

__all__ = ["INSTRUCTION_SETS", "Built", "Decoder", "Library", "StepArrays", "build"]
