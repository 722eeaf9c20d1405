"""Every interleaving of a small world over the real ``busync.protocol`` cores, breadth first.

There is no second model of the protocol: ``publisher`` and ``reader`` build a core in a given state, have it take one
step, and read off the state that it is in then. What a core does depends on that state and its input alone, so each
step is run once and remembered. ``steps`` and ``reader`` are what a shell, an application and a publisher's caller do
around the cores; ``sides`` is a reader with its connections and what may happen to it; ``space`` puts a publisher and
two readers together and checks the invariants; ``other`` and ``views`` put a publisher and one reader together with
any other reader, that is with any number of them; ``compare`` shows that nothing is lost by that; ``names`` makes
states equal that differ in numbers only; ``bounds`` says which worlds are explored; ``search`` explores one.
``python -m tests.explore --help`` runs it.
"""
