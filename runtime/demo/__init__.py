"""`tenuto demo`: one session that sleeps through its tool calls, is killed, and resumes at the step that failed."""

from runtime.demo.run import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
