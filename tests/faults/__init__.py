"""Fault injection: real processes and sockets, faults at random moments, every adopted element checked.

    schedule   seed -> rounds of fault steps: a pure function
    points     the steps of busync inside which a process can be made to die, stop, fork or exit
    page       what a child counts, in memory that survives its death
    pattern    what every element of every version must be
    child      a process under fire: commands, forks, exits, descriptors
    writer     a publisher that improvises; reader: a subscriber that does; rude: a peer that does not read
    stage      one round: children, faults, the calm after them, leaks
    report     the figures

``python -m tests.faults --seed 1 --steps 1000`` runs it.
"""
