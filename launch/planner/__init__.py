"""The capacity planner: memory, blocks, step floors and P:D splits before a GPU is at hand."""
