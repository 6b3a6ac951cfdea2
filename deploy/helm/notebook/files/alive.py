"""Ends well if something accepts connections at the socket file or the port of this pod that is named."""

import socket
import sys

where = sys.argv[1]
family = socket.AF_UNIX if where.startswith("/") else socket.AF_INET
with socket.socket(family) as probe:
    probe.settimeout(5)
    probe.connect(where if family == socket.AF_UNIX else ("127.0.0.1", int(where)))
