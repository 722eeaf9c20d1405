"""What moves bytes and descriptors between processes, and cannot decode them.

    endpoint  the directory where a publisher is found, and who may hold it
    door      packets with at most one descriptor, over a Unix socket: admission, acks, releases, segments
    bus       messages over ZeroMQ: announcements and manifests
    board     the newest version of every topic, in one shared page

Each registers what must not survive in a forked child with ``forks``.
"""
