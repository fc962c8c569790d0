"""Have `server.py` run pytest with these arguments, print what it prints and end as it does.

python mutation/ask.py SOCKET ARGUMENT...
"""

import json
import socket
import sys

with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    server.sendall(json.dumps(sys.argv[2:]).encode() + b"\n")
    said = b"".join(iter(lambda: server.recv(65536), b"")).decode()
text, _, code = said.rpartition("\nended with ")
print(text)
sys.exit(int(code))
