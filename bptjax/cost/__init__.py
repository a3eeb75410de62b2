"""The cost of a step: devices, FLOPs and memory, predicted and measured; and the settings of
`execution` that follow from the cost."""
