"""The network: ResNet, FPN, RPN, box and mask heads, and the weights they load."""
