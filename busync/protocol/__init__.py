"""The sans-IO core: what publisher and subscriber decide.

No torch, no ZeroMQ, no asyncio, no sockets, no clock: methods take messages and ``now`` (monotonic seconds), and
leave effects to be carried out by a shell. Tests drive it through loss, delay, death and forks without a socket.
"""
