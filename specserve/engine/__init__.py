"""The device side of the engine: the runner, CUDA graphs, memory budget, step shapes."""
