"""The device side of the engine: the runner, CUDA graphs, grammars and masks, memory budget, step shapes."""
