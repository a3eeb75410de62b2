"""What a step costs: devices, FLOPs and memory, predicted and measured, and the settings of
`execution` that they decide.
"""
