"""Pure tensor functions with static shapes: no nn.Module, no config."""
